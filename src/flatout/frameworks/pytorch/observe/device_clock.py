"""How long was the device busy with each part of a step? CUDA events from a pool, without a synchronisation added.

An event is recorded on the current stream where a part begins and ends; the times are read at the window's end, when
the device has long passed them. In: `push` and `pop` beside the host's clock. Out: device seconds by phase and step.
"""

from __future__ import annotations

from itertools import pairwise

import torch

Event = torch.cuda.Event


class DeviceClock:
    """Exclusive device time by phase, like `PhaseClock` but on the stream's own time."""

    def __init__(self) -> None:
        self._pool: list[Event] = []
        self._marks: list[tuple[Event, str]] = []
        """Each event with the phase that begins at it."""
        self._stack: list[str] = []
        self._steps: list[list[tuple[Event, str]]] = []

    def start(self) -> None:
        """Begin a window here."""
        self._steps = []
        self._marks = []
        self._mark(self._stack[-1] if self._stack else "unattributed")

    def _mark(self, phase: str) -> None:
        event = self._pool.pop() if self._pool else Event(enable_timing=True)
        event.record()
        self._marks.append((event, phase))

    def push(self, phase: str) -> None:
        """From here on the stream's time belongs to `phase`."""
        self._stack.append(phase)
        self._mark(phase)

    def pop(self, phase: str) -> None:
        """Back to what was before."""
        if self._stack:
            self._stack.pop()
        self._mark(self._stack[-1] if self._stack else "unattributed")

    def end_step(self) -> None:
        """A step ends here."""
        self._mark("unattributed")
        self._steps.append(self._marks)
        self._marks = [self._marks[-1]]

    def read(self) -> list[dict[str, float]]:
        """Device seconds by phase of each step since `start`; call it after the device was waited for."""
        found = []
        for marks in self._steps:
            spent: dict[str, float] = {}
            for (event, phase), (following, _) in pairwise(marks):
                spent[phase] = spent.get(phase, 0.0) + event.elapsed_time(following) / 1e3
            found.append(spent)
        for marks in self._steps:
            self._pool.extend(event for event, _ in marks[:-1])
        self._steps = []
        return found
