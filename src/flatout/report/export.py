"""How do the steps of a run become a file for other programs? A table, one row a step, or a trace for Perfetto.

In: windows, one by one. Out: text, piece by piece, so that a run of any length fits the memory. Nothing is computed but
places on a clock: a trace has durations of phases and not their order, so they are laid side by side within their step.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from flatout.records.plan import label
from flatout.records.trace import PHASES, Header, Window

HEADS = {".csv": "child,window,purpose,levers,step,", ".json": '{"displayTimeUnit": "ms",'}
"""How each kind of file begins; by that an earlier export is known."""

COLUMNS = ("child", "window", "purpose", "levers", "step", "start_s", "step_s", "outside_s")

_TRACKS = {1: "windows", 2: "steps", 3: "phases (durations; their order within a step is not recorded)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One window, with the process that it comes from.

    Attributes:
        child: The process, as its trace is named.
        header: Of its trace.
        window: What was recorded.
    """

    child: str
    header: Header
    window: Window

    @property
    def losses(self) -> tuple[float | None, ...]:
        """The loss of each step; None throughout where there is not one for every step."""
        whole = len(self.window.losses) == self.window.num_steps
        return self.window.losses if whole else (None,) * self.window.num_steps

    @property
    def starts_s(self) -> Iterator[float]:
        """When each step began on the trace's clock: steps follow each other without a gap."""
        return accumulate(self.window.step_s[:-1], initial=self.window.start_s)


def csv_text(found: Iterable[Stretch], more_phases: Iterable[str] = ()) -> Iterator[str]:
    """A table with one row a step; a phase that was not observed is an empty cell, as is a number that is not known.

    Args:
        found: The windows.
        more_phases: Phases in them besides `flatout.records.trace.PHASES`.
    """
    names = [*(name for name in PHASES if name != "unattributed"), *more_phases]
    yield _line((*COLUMNS, *(f"{name}_s" for name in names), "loss"))
    for one in found:
        window = one.window
        columns = [window.phases.get(name) for name in names]
        fixed = (one.child, window.index, window.purpose, label(window.levers))
        rows = zip(one.starts_s, window.step_s, window.outside_s, one.losses, strict=True)
        lines = (
            (*fixed, step, _number(start_s), _number(step_s), _number(outside_s),
             *("" if values is None else _number(values[step]) for values in columns), _number(loss))
            for step, (start_s, step_s, outside_s, loss) in enumerate(rows)
        )  # fmt: skip
        yield "".join(map(_line, lines))


def _number(value: float | None) -> str:
    return repr(value) if value is not None and math.isfinite(value) else ""


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def perfetto_text(found: Iterable[Stretch]) -> Iterator[str]:
    """A trace in the event format of Chrome, which Perfetto opens: a track each for windows, steps and phases.

    Losses and memory are counters. Each process is placed by when its recording began.

    Source: "Trace Event Format", Google, 2016: complete events (`X`), counters (`C`) and metadata (`M`), in µs.
    """
    yield f'{HEADS[".json"]} "traceEvents": [\n'
    numbers: dict[str, int] = {}
    first_unix_s: float | None = None
    separator = ""
    for one in found:
        first_unix_s = one.header.started_unix_s if first_unix_s is None else first_unix_s
        if one.child not in numbers:
            numbers[one.child] = len(numbers) + 1
            events = list(_metadata(one, numbers[one.child]))
        else:
            events = []
        shift_s = one.header.started_unix_s - first_unix_s
        events += _events(one, numbers[one.child], shift_s if math.isfinite(shift_s) else 0.0)
        yield separator + ",\n".join(json.dumps(event, allow_nan=False) for event in events)
        separator = ",\n"
    yield "\n]}\n"


def _metadata(one: Stretch, pid: int) -> Iterator[dict[str, Any]]:
    name = f"{one.header.script or 'a script'} ({one.child})"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for tid, track in _TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}


def _events(one: Stretch, pid: int, shift_s: float) -> Iterator[dict[str, Any]]:
    window = one.window
    begun_s = shift_s + window.start_s
    end_s = begun_s + math.fsum(window.step_s)
    about = {"window": window.index, "steps": window.num_steps, "observe": window.observe}
    yield _event(pid, 1, f"{window.purpose}: {label(window.levers)}", begun_s, end_s, about)
    steps = zip(one.starts_s, window.step_s, one.losses, strict=True)
    for step, (start_s, step_s, loss) in enumerate(steps):
        start_s += shift_s
        yield _event(pid, 2, "step", start_s, start_s + step_s, {"window": window.index, "step": step})
        yield from _phase_events(one, pid, step, start_s)
        if loss is not None and math.isfinite(loss):
            yield {"ph": "C", "name": "loss", "pid": pid, "ts": 1e6 * start_s, "args": {"loss": loss}}
    if window.peak_memory_bytes is not None:
        args = {"bytes": window.peak_memory_bytes}
        yield {"ph": "C", "name": "peak memory", "pid": pid, "ts": 1e6 * end_s, "args": args}


def _phase_events(one: Stretch, pid: int, step: int, start_s: float) -> Iterator[dict[str, Any]]:
    end_s = start_s + one.window.step_s[step]
    for name, values in one.window.phases.items():
        value_s = values[step]
        if value_s > 0 and name != "unattributed":
            stop_s = min(start_s + value_s, end_s)  # what was counted twice would run into the next step
            yield _event(pid, 3, name, start_s, stop_s, {"phase_s": value_s})
            start_s = stop_s


def _event(pid: int, tid: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s),
        "args": args,
    }  # fmt: skip
