"""How long was each part of a step? Exclusive times that sum to the wall time by construction.

One stamp is taken at each change of phase and the time since the last stamp goes to the phase that was on top, so
that nothing is counted twice and nothing is lost: what no phase claims is `unattributed`. In: `push` and `pop` around
parts, `end` at a step's end. Out: seconds by phase for each step. Knows nothing of PyTorch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter

BASE = ""
"""Pushed where the script's own code runs within a part (a closure within an update): outside every phase again."""


class PhaseClock:
    """Exclusive time by phase.

    >>> times = iter([0.0, 1.0, 3.0, 4.0, 10.0])
    >>> clock = PhaseClock(now=lambda: next(times))
    >>> clock.start(); clock.push("forward"); clock.push("data"); clock.pop("data"); clock.end()
    {'unattributed': 1.0, 'forward': 8.0, 'data': 1.0}
    """

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self.last = 0.0
        """The latest stamp, seconds."""
        self._stack: list[str] = []
        self._base = "unattributed"
        self._top = "unattributed"
        """Whose the time is at present."""
        self._spent: defaultdict[str, float] = defaultdict(float)

    @property
    def top(self) -> str:
        """The phase of the moment; `unattributed` outside of every phase."""
        return self._top

    def start(self) -> None:
        """Begin a step here, outside every phase, forgetting what was noted before."""
        self._spent = defaultdict(float)
        self._stack = []
        self._base = self._top = "unattributed"
        self.last = self._now()

    def _stamp(self) -> None:
        now = self._now()
        self._spent[self._top] += now - self.last
        self.last = now

    def push(self, phase: str) -> None:
        """From here on the time belongs to `phase`, until `pop`."""
        now = self._now()  # `_stamp`, without the call: this and `pop` are all that a part of a step costs
        self._spent[self._top] += now - self.last
        self.last = now
        self._stack.append(phase)
        self._top = phase or self._base

    def pop(self, phase: str, *, base: str | None = None) -> None:
        """The time belongs again to what it belonged to before the last `push` of `phase`.

        What was pushed since and never popped, because an exception passed by, is over as well. With `base`, time
        outside every phase belongs to that from here on (the loss, after a forward call).
        """
        now = self._now()
        self._spent[self._top] += now - self.last
        self.last = now
        stack = self._stack
        if stack and stack[-1] == phase:
            stack.pop()
        elif phase in stack:
            while stack.pop() != phase:
                pass
        if base is not None:
            self._base = base
        self._top = (stack[-1] if stack else BASE) or self._base

    def end_base(self) -> None:
        """Time outside every phase belongs to nothing again, from the end of the present one on."""
        if self._base != "unattributed":
            self._base = "unattributed"
            self._top = (self._stack[-1] if self._stack else BASE) or self._base

    def reassign(self, phase: str) -> None:
        """Everything noted in this step so far was part of `phase` (an evaluation before the step proper)."""
        self._stamp()
        self._spent = defaultdict(float, {phase: sum(self._spent.values())})

    def mark(self) -> dict[str, float]:
        """End the step here, of whose parts nothing is wanted."""
        self.last = self._now()
        return {}

    def end(self) -> dict[str, float]:
        """End the step here and begin the next one; returns the seconds by phase of the step that ended."""
        self._stamp()
        spent, self._spent = self._spent, defaultdict(float)
        self.end_base()
        return dict(spent)
