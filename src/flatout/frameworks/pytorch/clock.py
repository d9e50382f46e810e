"""How long was each part of a step? Exclusive times that sum to the wall time by construction.

One stamp is taken at each change of phase and the time since the last stamp goes to the phase that was on top, so
that nothing is counted twice and nothing is lost: what no phase claims is `unattributed`. In: `push` and `pop` around
parts, `end` at a step's end. Out: seconds by phase for each step. Knows nothing of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


class PhaseClock:
    """Exclusive time by phase.

    >>> times = iter([0.0, 1.0, 3.0, 4.0, 10.0])
    >>> clock = PhaseClock(now=lambda: next(times))
    >>> clock.start(); clock.push("forward"); clock.push("data"); clock.pop(); clock.end()
    {'unattributed': 1.0, 'forward': 8.0, 'data': 1.0}
    """

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self.last = 0.0
        """The latest stamp, seconds."""
        self._stack: list[str] = []
        self._base = "unattributed"
        self._spent: dict[str, float] = {}

    def start(self) -> None:
        """Begin a step here, forgetting what was noted before."""
        self._spent = {}
        self._base = "unattributed"
        self.last = self._now()

    def _stamp(self) -> None:
        now = self._now()
        top = self._stack[-1] if self._stack else self._base
        self._spent[top] = self._spent.get(top, 0.0) + now - self.last
        self.last = now

    def push(self, phase: str) -> None:
        """From here on the time belongs to `phase`, until `pop`."""
        self._stamp()
        self._stack.append(phase)

    def pop(self) -> None:
        """The time belongs again to what it belonged to before the last `push`."""
        self._stamp()
        if self._stack:
            self._stack.pop()

    def between(self, phase: str) -> None:
        """From here on, time outside every phase belongs to `phase` (the loss, after a forward call)."""
        self._stamp()
        self._base = phase

    def reassign(self, phase: str) -> None:
        """Everything noted in this step so far was part of `phase` (an evaluation before the step proper)."""
        self._stamp()
        self._spent = {phase: sum(self._spent.values())}

    def end(self) -> dict[str, float]:
        """End the step here and begin the next one; returns the seconds by phase of the step that ended."""
        self._stamp()
        spent, self._spent = self._spent, {}
        self._base = "unattributed"
        return spent
