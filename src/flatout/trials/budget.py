"""How much time is there, and what fits into it?

In: what was asked for, the time of a step, the modules of the models. Out: deadlines, the length of a window, and what
compiling is expected to take until it has been seen here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from flatout.child.orders import settling_steps
from flatout.errors import Inconclusive
from flatout.frameworks.lever import Lever
from flatout.records.facts import Facts
from flatout.records.plan import Candidate, Trial
from flatout.records.trace import FOREIGN_LIMIT, Levers

Defaults = tuple[tuple[float, float], ...]
TUNE_DEFAULTS_S: Defaults = ((1.0, 300.0), (0.2, 180.0), (0.0, 75.0))
WHY_DEFAULTS_S: Defaults = ((0.0, 60.0),)
"""What is taken where nothing was asked for; of steps slower than the first number too few windows fit into less."""

COSTLY_DEFAULT_S = 120.0
"""What a search takes where nothing was asked for and something is left to try that compiles or needs processes."""

DEVICE_DEFAULT_S = 300.0
"""What a search on a device takes where nothing was asked for: starting, loading libraries and compiling are slower
there beside what a step takes, and there is more to try."""

MOST_DEFAULT_S = 600.0
"""Very slow steps get as much as the least of it takes, up to this."""

OVERTIME = 0.5
"""Of the budget, where nothing was asked for: how much longer measuring the best again in processes may take, where it
would otherwise be lost."""

WRITE_UP_S = 12.0
"""What starting the command, the looks after the search and writing the report take."""


class Budget:
    """The aimed wall time of one measurement, from its start on: what was asked for, or a default."""

    def __init__(self, asked_s: float | None, defaults: Defaults = TUNE_DEFAULTS_S) -> None:
        self._begun_s = time.perf_counter()
        self._defaults = defaults if asked_s is None else ()
        self.total_s = defaults[-1][1] if asked_s is None else asked_s

    @property
    def spent_s(self) -> float:
        """Wall seconds since the start."""
        return time.perf_counter() - self._begun_s

    @property
    def left_s(self) -> float:
        """Seconds left for measuring; negative where more was spent."""
        return self._measuring_s - self.spent_s

    @property
    def share_spent(self) -> float:
        """How much of it is spent, at most 1."""
        return min(self.spent_s / self.total_s, 1.0)

    @property
    def overtime_s(self) -> float:
        """How much longer than it the last measurement may take where it would otherwise be lost."""
        return OVERTIME * self.total_s if self._defaults else 0.0

    @property
    def end_s(self) -> float:
        """The `time.perf_counter` at which all of it is spent."""
        return self._begun_s + self.total_s

    @property
    def _measuring_s(self) -> float:
        return self.total_s - min(WRITE_UP_S, self.total_s / 10)

    def deadline_s(self, share: float = 1.0) -> float:
        """The `time.perf_counter` at which a share of the time for measuring is spent."""
        return self._begun_s + self._measuring_s * share

    def allow(self, total_s: float) -> None:
        """Take as much as that, where nothing was asked for."""
        if self._defaults:
            self.total_s = max(self.total_s, total_s)

    def suit(self, num_steps: int, step_s: float) -> None:
        """Take more for slow steps, of which so many are needed at the least, where nothing was asked for."""
        usual_s = next((total_s for slow_s, total_s in self._defaults if step_s > slow_s), None)
        if usual_s is not None:
            self.total_s = max(usual_s, min(num_steps * step_s, MOST_DEFAULT_S))

    def require(
        self,
        num_steps: int,
        step_s: float,
        script: str,
        *,
        patience: float = 1.0,
        taken: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Make sure that so many steps can be made within the budget, or within `patience` times as long.

        `taken` says what share of the CPU others use at this moment.

        Raises:
            Inconclusive: They cannot; the hint names a budget that suffices.
        """
        if num_steps * step_s <= patience * self.total_s:
            return
        others, budget, takes = taken() or 0.0, f"for a budget of {self.total_s:.3g} s", f"takes {step_s:.2g} s"
        is_busy = others > FOREIGN_LIMIT
        used = f"others use {100 * others:.0f} % of the CPU, and a step of `{script}` {takes} meanwhile; "
        longer = f"`--budget {math.ceil((num_steps * step_s + self.spent_s) / 60)}m`"
        quiet, smaller = f"wait until the machine is quiet, or {longer}", f"{longer}, or a smaller batch or model"
        raise Inconclusive(
            f"the machine is too busy {budget}" if is_busy else f"a step of `{script}` {takes}: too long {budget}",
            cause=f"{used * is_busy}an answer takes about {num_steps} steps more at the least, with what lies between "
            "them",
            hint=quiet if is_busy else smaller,
        )


# -- windows ---------------------------------------------------------------------------------------------------------

WINDOW_S = 0.25
"""Aimed length of a window: 50 ticks of the kernel's CPU accounting on two cores, so that others' use shows to 2 %.
The speed of a shared machine drifts within seconds, and shorter windows bring the two sides of a pair closer."""

LEAST_TRAINING_S = WINDOW_S / 4
"""So much of a window is training at the least, however long an evaluation may make it: less is noise."""

MAX_STEPS = 2000

WHOLE_EPOCHS_S = 2.0
"""Epochs shorter than this are measured whole, so that every window pays for their beginning and end alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long a window is.

    Attributes:
        num_steps: Steps that are measured.
        skip_steps: Steps after a change of levers that are not.
        loader_skip_steps: The same after a change of the loader's workers, whose queue must settle first.
        epoch_steps: Of how many it is a multiple, because epochs are short; 0 where it may be another number.
    """

    num_steps: int
    skip_steps: int
    loader_skip_steps: int
    epoch_steps: int = 0

    def stretched(self, by: float) -> Size:
        """The same with windows so many times as long, where that is possible.

        >>> size_for(0.004, 938).stretched(1.2).num_steps, size_for(0.004, 24).stretched(1.2).num_steps
        (76, 72)
        """
        return self if self.epoch_steps else replace(self, num_steps=max(round(self.num_steps * by), 1))

    def within(self, run_steps: int) -> Size:
        """The same as far as it fits into one run of the script, with its settling before and room for another.

        >>> [size_for(0.004, 24).within(num).num_steps for num in (1000, 200, 80)]
        [72, 48, 20]
        """
        fitting = min(max(run_steps // 4, 1), self.num_steps)
        whole = fitting - fitting % self.epoch_steps if self.epoch_steps else 0
        return replace(self, num_steps=whole or fitting, epoch_steps=self.epoch_steps if whole else 0)

    def skipped(self, before: Levers, levers: Levers, known: Mapping[str, Lever]) -> int:
        """Steps after a change that are not measured: more where a loader starts over for it."""
        changed = [name for name in {*before, *levers} if before.get(name) != levers.get(name) and name in known]
        return self.loader_skip_steps if any(known[n].toggles == "epoch" for n in changed) else self.skip_steps


def size_for(step_s: float, epoch_steps: int | None, outside_s: float = 0.0) -> Size:
    """The window size for a step time, and for a step's part of what lies between steps.

    >>> size_for(0.004, 938).num_steps, size_for(1.2, None).num_steps, size_for(0.004, 24).num_steps
    (63, 1, 72)
    >>> size_for(0.03, 40, 0.1).num_steps, size_for(0.004, 938, 0.1).num_steps
    (3, 16)
    """
    num = min(math.ceil(max(WINDOW_S / (step_s + outside_s), LEAST_TRAINING_S / step_s)), MAX_STEPS)
    whole = epoch_steps if epoch_steps and epoch_steps * (step_s + outside_s) <= WHOLE_EPOCHS_S else 0
    if whole:
        num = math.ceil(num / whole) * whole
    settle = min(max(math.ceil(0.3 / step_s), 3), 40)
    return Size(num_steps=num, skip_steps=settling_steps(step_s), loader_skip_steps=settle, epoch_steps=whole)


# -- compiling -------------------------------------------------------------------------------------------------------

STARTING_S, STARTING_ON_DEVICE_S = 15.0, 8.0
"""What the compiler's start and its first kernels take, however small the model."""

MODULE_S, MODULE_ON_DEVICE_S = 0.6, 0.15
"""What each module adds: its forward and its backward become kernels of their own. Those of a device are not compiled
by a C++ compiler, and in several processes at once; an estimate until one was seen there."""


def compiling_s(
    candidate: Candidate, levers: Mapping[str, Lever], facts: Facts | None, trials: Iterable[Trial] = ()
) -> float:
    """Seconds that engaging a candidate is expected to take for compiling; 0 where nothing in it compiles.

    Measured on two cores with cold caches, seconds from engaging to the first step: 6 modules (`lenet.py`, `vae`) 20
    and 22, 28 modules (a Transformer of two layers) 20, 55 modules (`char_gpt.py`) 46 and 59. Warm caches make it a
    tenth.

    Args:
        candidate: What would be engaged.
        levers: The catalogue, by name.
        facts: The models of the script; None where nobody has looked yet.
        trials: What has been tried here: compiling takes at least as long as the longest of them took.
    """
    compiling = [name for name in candidate.levers if levers[name].compiles]
    if not compiling:
        return 0.0
    regional = any(candidate.levers[name].get("mode") == "regional" for name in compiling)
    seen = (t.engage_s for t in trials if any(name in compiling for name in t.levers))
    num_modules = 0.0
    for model in facts.models if facts is not None else ():  # of blocks that repeat, one is enough for "regional"
        num_modules += model.num_modules / (max(model.num_repeated_blocks, 1) if regional else 1)
    on_device = facts is not None and facts.device != "cpu"
    starting_s, module_s = (STARTING_ON_DEVICE_S, MODULE_ON_DEVICE_S) if on_device else (STARTING_S, MODULE_S)
    fastest = min(levers[name].compiles_faster for name in compiling)
    return max((starting_s + module_s * num_modules) / fastest, *seen, 0.0)
