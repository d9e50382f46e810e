"""How long is a window? In: the time of a step, and the length of an epoch. Out: numbers of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flatout.child.orders import settling_steps

WINDOW_S = 0.25
"""Aimed length of a window: 50 ticks of the kernel's CPU accounting on two cores, so that others' use shows to 2 %.
The speed of a shared machine drifts within seconds, and shorter windows bring the two sides of a pair closer."""

MAX_STEPS = 2000

WHOLE_EPOCHS_S = 2.0
"""Epochs shorter than this are measured whole, so that every window pays the loader's start-up alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long a window is.

    Attributes:
        num_steps: Steps that are measured.
        skip_steps: Steps after a change of levers that are not.
        loader_skip_steps: The same after a change of the loader's workers, whose queue must settle first.
        whole_epochs: Whether it is so many because epochs are short, and may not be another number.
    """

    num_steps: int
    skip_steps: int
    loader_skip_steps: int
    whole_epochs: bool = False

    def stretched(self, by: float) -> Size:
        """The same with windows so many times as long, where that is possible.

        >>> size_for(0.004, 938).stretched(1.2).num_steps, size_for(0.004, 24).stretched(1.2).num_steps
        (76, 72)
        """
        return self if self.whole_epochs else replace(self, num_steps=max(round(self.num_steps * by), 1))


def size_for(step_s: float, epoch_steps: int | None) -> Size:
    """The window size for a step time.

    >>> size_for(0.004, 938).num_steps, size_for(1.2, None).num_steps, size_for(0.004, 24).num_steps
    (63, 1, 72)
    """
    num = min(max(math.ceil(WINDOW_S / step_s), 1), MAX_STEPS)
    whole = epoch_steps if epoch_steps and epoch_steps * step_s <= WHOLE_EPOCHS_S else 0
    if whole:
        num = math.ceil(num / whole) * whole
    settle = min(max(math.ceil(0.3 / step_s), 3), 40)
    return Size(num_steps=num, skip_steps=settling_steps(step_s), loader_skip_steps=settle, whole_epochs=whole > 0)
