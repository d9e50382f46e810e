"""How long was each part of a step on the device's own clock? Exclusive times that sum to the step by construction.

An event is recorded where a part begins or ends, on the stream that was current where the window began; what lies
between two of them, waiting included, belongs to the part that began at the first. They are read at the end of a
window, which waits for the last of them and for nothing else. In: which part it is from here on, as the host's clock
knows. Out: seconds by phase and step.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from flatout.frameworks.pytorch.observe import devices

Mark = tuple[devices.Event, str]
"""A point on the stream, and the phase that begins there."""


class DeviceClock:
    """The clock of one device. It runs from `start` to `read`; what it is told at other times costs next to nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.Stream | None = None
        self._pool: list[devices.Event] = []
        self._steps: list[list[Mark]] = []
        self._marks: list[Mark] = []
        """Of the present step; the first is the end of the step before."""
        self._runs = self._is_marking = False

    def start(self, phase: str) -> None:
        """A window begins here, where a step has ended."""
        self._take_back()
        self._runs, self._stream = True, devices.current_stream(self.device)
        self._mark(phase)

    def mark(self, phase: str) -> None:
        """From here on the stream's time belongs to `phase`."""
        if self._runs and phase != self._marks[-1][1] and not devices.is_capturing(self.device):
            self._mark(phase)

    def _mark(self, phase: str) -> None:
        if self._is_marking or self._stream is None:  # the collector of garbage has come in between
            return
        self._is_marking = True
        try:
            event = self._pool.pop() if self._pool else devices.new_event(self.device)
            devices.record(event, self._stream)
            self._marks.append((event, phase))
        finally:
            self._is_marking = False

    def reassign(self, phase: str, following: str) -> None:
        """All of this step so far was part of `phase` (an evaluation before the step proper)."""
        if self._runs and not devices.is_capturing(self.device):
            (first, _), *others = self._marks
            self._marks = [(first, phase)]
            self._pool += [event for event, _ in others]
            self._mark(following)

    def end_step(self, following: str) -> None:
        """A step ends here."""
        if self._runs:
            self._mark(following)
            self._steps.append(self._marks)
            self._marks = self._marks[-1:]

    def read(self) -> list[dict[str, float]]:
        """Seconds by phase of each step since `start`, after the last of them is done; the clock stops."""
        if self._steps:
            last, _ = self._steps[-1][-1]
            last.synchronize()
        found = [_spent_s(marks) for marks in self._steps]
        self._take_back()
        return found

    def _take_back(self) -> None:
        self._runs = False
        self._pool += [event for marks in (*(step[:-1] for step in self._steps), self._marks) for event, _ in marks]
        self._steps, self._marks = [], []


def _spent_s(marks: list[Mark]) -> dict[str, float]:
    spent_s: dict[str, float] = {}
    for (event, phase), (following, _) in pairwise(marks):
        spent_s[phase] = spent_s.get(phase, 0.0) + event.elapsed_time(following) / 1e3
    return spent_s
