"""What has been measured of a window so far?

In: steps as they end. Out: the `Window` record. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatout.child.orders import Order
from flatout.frameworks.contract import Step
from flatout.machine.gpu_watch import GpuWatch
from flatout.records.trace import OUTSIDE, Window


class OpenWindow:
    """A window that is being measured: its steps by when Python was through with them, until it is recorded."""

    def __init__(
        self, order: Order, *, index: int, started_s: float, when_done: Callable[[], None] | None = None
    ) -> None:
        self.order = order
        self.index = index
        self.when_done = when_done
        self.foreign: Any = None
        self.gpus: GpuWatch | None = None
        """Looks at the GPUs when the window ends, where it is to be judged by."""
        self._began_unix_s = 0.0
        self.step_s: list[float] = []
        self._outside_s: list[float] = []
        self._phases: dict[str, list[float]] = {}
        self._last_s = started_s
        self._training_s = 0.0
        self._start_on_trace_s = 0.0

    def restart(self, now_s: float, on_trace_s: float) -> None:
        """The first step begins now."""
        self._last_s = now_s
        self._start_on_trace_s = on_trace_s
        self._began_unix_s = time.time()

    def add(self, step: Step) -> None:
        """A step has ended."""
        self.step_s.append(step.ended_s - self._last_s)
        self._outside_s.append(step.outside_s)
        self._training_s += self.step_s[-1] - step.outside_s
        self._last_s = step.ended_s
        number, whole = len(self.step_s) - 1, self.order.observe not in ("off", "ends")
        for name, seconds in step.phases.items():
            if name in OUTSIDE or (whole and name != "unattributed"):
                row = self._phases.setdefault(name, [])
                row.extend([0.0] * (number - len(row)))
                row.append(seconds)

    def add_all(self, ends_s: list[float]) -> None:
        """Steps of which nothing but their ends is known."""
        last_s = self._last_s
        for now_s in ends_s:
            self.step_s.append(now_s - last_s)
            last_s = now_s
        self._training_s += last_s - self._last_s
        self._last_s = last_s
        self._outside_s.extend([0.0] * len(ends_s))

    @property
    def complete(self) -> bool:
        """Whether it has its steps, or its time is over; an evaluation ends none, or more would seem to lie in it."""
        return len(self.step_s) >= self.order.num_steps or self._training_s >= self.order.limit_s

    def record(self, found: Any, foreign_fraction: float | None) -> Window:
        """The window as it goes into the trace."""
        num = len(self.step_s)
        phases, named_s = _whole({name: row + [0.0] * (num - len(row)) for name, row in self._phases.items()})
        device_phases, named_on_device_s = _whole(found.get("device_phases", {}))
        step_s, outside_s = found.get("step_s", self.step_s), found.get("outside_s", self._outside_s)
        if len(step_s) != num:
            raise RuntimeError(f"{num} steps have ended, and the device's clock has seen {len(step_s)}")
        return Window(
            index=self.index,
            purpose=self.order.purpose,
            levers=self.order.levers,
            observe=self.order.observe,
            step_s=tuple(round(s, 9) for s in step_s),  # a clock knows no more than nanoseconds
            outside_s=tuple(round(s, 9) for s in outside_s),
            start_s=self._start_on_trace_s,
            phases=phases,
            device_phases=device_phases,
            not_trained_s=named_on_device_s or named_s,
            losses=tuple(found.get("losses", ())),
            call_s=tuple(round(s, 9) for s in found.get("call_s", ())),
            foreign_fraction=foreign_fraction,
            recompilations=found.get("recompilations", 0),
            peak_memory_bytes=found.get("peak_memory_bytes"),
            new_epochs=found.get("new_epochs", 0),
            smaller_batches=found.get("smaller_batches", 0),
            num_calls=tuple(found.get("num_calls", ())),
            goal=found.get("goal", "throughput"),
            order=self.order.number,
            **(self.gpus.since(self._began_unix_s) if self.gpus is not None else {}),
        )


def _whole(rows: Mapping[str, Sequence[float]]) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """Phases with what has a name of its own in one (`forward: Sequential`) added to it, and those by name in all.

    >>> _whole({"forward": [1.0, 2.0], "forward: Teacher": [3.0, 4.0]})
    ({'forward': (4.0, 6.0)}, {'Teacher': 7.0})
    """
    phases: dict[str, tuple[float, ...]] = {}
    named_s: dict[str, float] = {}
    for whole, row in rows.items():
        phase, _, name = whole.partition(": ")
        phases[phase] = tuple(map(sum, zip(phases[phase], row, strict=True))) if phase in phases else tuple(row)
        if name:
            named_s[name] = sum(row)
    return phases, named_s
