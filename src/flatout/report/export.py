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

    def steps(self) -> Iterator[tuple[int, float, float, float, float | None]]:
        """Number, start, seconds, seconds between steps and loss of each; they follow each other without a gap."""
        window = self.window
        whole = len(window.losses) == window.num_steps
        losses = window.losses if whole else (None,) * window.num_steps
        starts_s = accumulate(window.step_s[:-1], initial=window.start_s)
        return zip(range(window.num_steps), starts_s, window.step_s, window.outside_s, losses, strict=True)


def csv_text(found: Iterable[Stretch]) -> Iterator[str]:
    """A table with one row a step; a phase that was not observed is an empty cell, as is a number that is not known."""
    names = [name for name in PHASES if name != "unattributed"]
    yield _line((*COLUMNS, *(f"{name}_s" for name in names), "loss"))
    for one in found:
        columns = [one.window.phases.get(name) for name in names]
        fixed = (one.child, one.window.index, one.window.purpose, label(one.window.levers))
        for step, start_s, step_s, outside_s, loss in one.steps():
            phases = ("" if values is None else _number(values[step]) for values in columns)
            yield _line((*fixed, step, _number(start_s), _number(step_s), _number(outside_s), *phases, _number(loss)))


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
        is_new = one.child not in numbers
        pid = numbers.setdefault(one.child, len(numbers) + 1)
        events = [
            *(_metadata(one, pid) if is_new else ()),
            *_events(one, pid, one.header.started_unix_s - first_unix_s),
        ]
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
    for step, start_s, step_s, _, loss in one.steps():
        start_s += shift_s
        yield _event(pid, 2, "step", start_s, start_s + step_s, {"window": window.index, "step": step})
        at_s = start_s
        for name, values in window.phases.items():
            if values[step] > 0 and name != "unattributed":
                stop_s = min(at_s + values[step], start_s + step_s)  # counted twice, it would run into the next step
                yield _event(pid, 3, name, at_s, stop_s, {"phase_s": values[step]})
                at_s = stop_s
        if loss is not None and math.isfinite(loss):
            yield {"ph": "C", "name": "loss", "pid": pid, "ts": 1e6 * start_s, "args": {"loss": loss}}
    if window.peak_memory_bytes is not None:
        args = {"bytes": window.peak_memory_bytes}
        yield {"ph": "C", "name": "peak memory", "pid": pid, "ts": 1e6 * end_s, "args": args}


def _event(pid: int, tid: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s),
        "args": args,
    }  # fmt: skip
