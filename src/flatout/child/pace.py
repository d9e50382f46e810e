"""How long do a run's steps take, do they take longer than before, and how many of them are alike?

In: windows that nobody asked for. Out: a jump of the step time, and how many steps a window needs so that the next one
of as many takes as long. Arithmetic only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from flatout.records.trace import Window

JUMP = 1.10
"""A step time that is so many times what it was, and beyond all that the last windows had, gives reason to look."""

NUM_JUMPED = 2
"""So many windows in a row have to show it: one may be a pause of the machine."""

UNEVEN = 0.05
"""Windows that differ by less than this share of their length are alike."""

NUM_KEPT = 600
"""Steps that are looked at to find out how many are alike."""

PAUSE = 20.0
"""A step of more than so many usual ones counts as so many: something was done once."""

MOST_LONGER, MOST_STEPS = 4, 10
"""Windows become at most so many times longer, or have so many steps: ten pairs of windows of ten are 200 steps."""


@dataclass(slots=True)
class Pace:
    """How long a step takes, followed from window to window.

    Two measures of a window: the mean, in which rare long steps count, and the median, in which an evaluation that
    nobody can tell from a step does not. Either may jump.

    >>> pace, jumps = Pace(), []
    >>> for number, step_s in enumerate([0.25] * 5 + [0.5] * 2):
    ...     steps = (step_s,) * 8
    ...     jump = pace.follow(
    ...         Window(index=number, purpose="run", levers={}, observe="ends", step_s=steps, outside_s=(0.0,) * 8,
    ...                start_s=0.0),
    ...         also_quicker=False,
    ...     )
    ...     jumps.append(jump)
    >>> jumps[-2:]
    [None, (0.25, 0.5)]
    """

    _mean: _Level = field(default_factory=lambda: _Level())
    _usual: _Level = field(default_factory=lambda: _Level())
    _shapes: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    """Steps as multiples of their window's median, so that they stay comparable when all take longer."""

    def follow(self, window: Window, *, also_quicker: bool) -> tuple[float, float] | None:
        """The next window. If the step time has jumped: what it was, and what it is, seconds."""
        steps = training_steps(window)
        usual_s = median(steps)
        if usual_s > 0:
            self._shapes.extend(min(step_s / usual_s, PAUSE) for step_s in steps)
        jumps = [
            self._mean.follow(window.training_step_s, also_quicker=also_quicker),
            self._usual.follow(usual_s, also_quicker=also_quicker),
        ]
        return next((jump for jump in jumps if jump is not None), None)

    def forget(self) -> None:
        """The levers were changed: the next steps have another pace."""
        self._mean, self._usual = _Level(), _Level()

    def alike(self, fewest: int) -> int:
        """How many steps a window needs, at least `fewest`."""
        return even(self._shapes, fewest)


@dataclass(slots=True)
class _Level:
    """One measure of the last windows."""

    _known: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _odd: list[float] = field(default_factory=list)
    """Those since it jumped."""

    def follow(self, step_s: float, *, also_quicker: bool) -> tuple[float, float] | None:
        if len(self._known) < NUM_JUMPED:
            self._known.append(step_s)
            return None
        usual_s = median(self._known)
        slower = step_s > max(JUMP * usual_s, *self._known)
        quicker = step_s < min(usual_s / JUMP, *self._known)
        if not (slower or (quicker and also_quicker)):
            self._known.append(step_s)
            self._odd.clear()
            return None
        self._odd.append(step_s)
        if len(self._odd) < NUM_JUMPED:
            return None
        self._known = deque(self._odd, maxlen=8)
        self._odd = []
        return usual_s, median(self._known)


def training_steps(window: Window) -> list[float]:
    """Seconds of each step, without evaluation and checkpoints."""
    return [step_s - outside_s for step_s, outside_s in zip(window.step_s, window.outside_s, strict=True)]


def usual_step_s(window: Window) -> float:
    """Mean seconds of a step, where one that is `PAUSE` times the median or more counts as so many.

    >>> usual_step_s(Window(index=0, purpose="run", levers={}, observe="off", step_s=(0.5, 0.5, 0.5, 60.0),
    ...                     outside_s=(0.0,) * 4, start_s=0.0))
    2.875
    """
    steps = training_steps(window)
    most_s = PAUSE * median(steps)
    return sum(min(step_s, most_s) for step_s in steps) / len(steps)


def even(steps: Sequence[float], fewest: int) -> int:
    """The smallest number of consecutive steps, from `fewest` on, of which one row takes as long as the next.

    Where none does: the number with the least scatter if that halves it, else `fewest`.

    >>> even([1.0] * 100, 3), even(([5.0] + [1.0] * 9) * 20, 3)
    (3, 10)
    """
    steps = list(steps)
    least = scatter(steps, fewest)
    if least <= UNEVEN:
        return fewest
    best, allowed = fewest, least / 2
    for num in range(fewest + 1, min(max(MOST_LONGER * fewest, MOST_STEPS), len(steps) // 4) + 1):
        found = scatter(steps, num)
        if found <= UNEVEN:
            return num
        if found < allowed:
            best, allowed = num, found
    return best


def scatter(steps: Sequence[float], num: int) -> float:
    """Mean distance of rows of `num` steps from their mean, as a share of it; 0 where there are fewer than four."""
    rows = [sum(steps[place : place + num]) for place in range(0, len(steps) - num + 1, num)]
    mean = sum(rows) / len(rows) if rows else 0.0
    return sum(abs(row - mean) for row in rows) / len(rows) / mean if len(rows) >= 4 and mean > 0 else 0.0
