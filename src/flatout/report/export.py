"""How do the steps of a run become a file for other programs? A table, one row a step, or a trace for Perfetto.

In: the traces of a run folder. Out: a file, written window by window, so that a run of any length fits the memory. A
trace has durations of phases and not their order, so they are laid side by side within their step; profiled steps have
both, on tracks of their own.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import RecordError, UsageError, cannot_write
from flatout.records import output_file
from flatout.records.plan import label
from flatout.records.profile import Profile
from flatout.records.trace import PHASES, Header, Window
from flatout.records.trace_file import Reader
from flatout.run import folder

if TYPE_CHECKING:
    from flatout.report.view import View

HEADS = {".csv": "child,window,purpose,levers,step,", ".json": '{"displayTimeUnit": "ms",'}
"""How each kind of file begins; by that an earlier export is known."""

COLUMNS = ("child", "window", "purpose", "levers", "step", "start_s", "step_s", "outside_s")

_TRACKS = {1: "windows", 2: "steps", 3: "phases (durations; their order within a step is not recorded)"}

_PROFILED = {"operator": 10, "launch": 11, "wait": 11, "allocation": 11, "phase": 12, "kernel": 20, "transfer": 20}
"""Tracks of profiled steps by what is on them; those of a device begin with the last number, one for each stream."""

_PROFILED_TRACKS = {10: "operators", 11: "calls", 12: "phases"}

_Traced = tuple[str, Header, Window | Profile]
"""A window or a profile, with the process that it comes from, as its trace is named, and that trace's header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written for other programs.

    Attributes:
        file: Where.
        run: The run folder.
        num_steps: Steps in it.
        remarks: What the reader must know, e.g. windows that were left out.
    """

    file: str
    run: str
    num_steps: int
    remarks: tuple[str, ...] = ()


def export(run: str | None, path: Path) -> Exported:
    """Write every step of a run to a file: `.csv` is a table, `.json` a trace for Perfetto.

    An earlier export may be written over, any other file may not.

    Raises:
        UsageError: The file's name ends otherwise, or the file is there and is no export; there is no such run.
        RecordError: The run folder holds no trace, or one that is broken, or no step.
        MachineError: The file cannot be written.
    """
    kind = path.suffix.lower()
    if kind not in HEADS:
        raise UsageError(
            f"`--export {path}` ends in no format that can be written",
            cause="the ending decides: `.csv` is a table with one row a step, `.json` a trace for Perfetto",
            hint="e.g. `--export steps.csv`",
        )
    output_file.check(path, output_file.FileKind(name="export", mark=HEADS[kind].encode()), option="--export")
    place = folder.find(folder.working_folder(), run)
    remarks: list[str] = []
    num_steps = 0

    def counted() -> Iterator[_Traced]:
        nonlocal num_steps
        for one in _traced(place, remarks):
            num_steps += one[2].num_steps if isinstance(one[2], Window) else 0
            yield one

    def text() -> Iterator[str]:
        if kind == ".csv":  # whose columns are known only when all has been read once
            seen = {name for _, _, one in _traced(place, []) if isinstance(one, Window) for name in one.account}
            yield from _csv_text(counted(), sorted(seen - {*PHASES}))
        else:
            yield from _perfetto_text(counted())
        if not num_steps:
            raise RecordError(
                f"there is no step to export in `{place}`",
                cause="; ".join(remarks) or "the run ended before a step was recorded",
                hint="`flatout why SCRIPT` records steps",
            )

    try:
        output_file.write_whole(text(), path)
    except OSError as problem:
        raise cannot_write(path, problem) from None
    return Exported(file=str(path), run=str(place), num_steps=num_steps, remarks=tuple(remarks))


def written(done: Exported) -> View:
    """What is shown of a file that was written for other programs."""
    from flatout.report import words
    from flatout.report.view import Row, View

    rows = [Row(label="written", value=done.file, note=f": {words.plural(done.num_steps, 'step')}")]
    rows += [Row(label="mind", value=remark, tone="caution") for remark in done.remarks]
    if done.file.lower().endswith(".json"):
        note = "at https://ui.perfetto.dev, or `chrome://tracing`; it stays on your machine"
        rows.append(Row(label="open it", note=note))
    again = f"flatout report {shlex.quote(str(words.nearby(Path(done.run))))}"
    return View(command="flatout report", title="", verdict=tuple(rows), next=(again,))


def _traced(place: Path, remarks: list[str]) -> Iterator[_Traced]:
    """Each window with steps, and each profile behind its own, of every process in the order of their starts.

    What is left out goes into the remarks.

    Raises:
        RecordError: See `flatout.records.trace_file.Reader`.
    """

    def order(path: Path) -> tuple[int, str]:
        number = re.fullmatch(r"trace-(\d+)\.jsonl", path.name)
        return (int(number[1]) if number else 0, path.name)

    paths = sorted(place.glob("trace-*.jsonl"), key=order)
    if not paths:
        remarks.append("the traces of this run are not there any more")
    for path in paths:
        header: Header | None = None
        reader = Reader(path)
        num_odd = 0
        for record in reader:
            if isinstance(record, Header):
                header = record
            elif isinstance(record, Profile) and header is not None:
                yield path.stem.removeprefix("trace-"), header, record
            elif isinstance(record, Window) and header is not None:
                if any(len(times) != record.num_steps for times in (record.outside_s, *record.account.values())):
                    num_odd += 1
                elif record.step_s:
                    yield path.stem.removeprefix("trace-"), header, record
        if num_odd:
            remarks.append(f"windows of `{path.name}` left out: {num_odd} with more or fewer times than steps")
        if reader.torn:
            remarks.append(f"`{path.name}` is cut: its last line is left out")


def _losses(window: Window) -> Sequence[float | None]:
    """The loss of each step; None where there is not one for every step, or where it is not finite."""
    if len(window.losses) != window.num_steps:
        return (None,) * window.num_steps
    return [loss if math.isfinite(loss) else None for loss in window.losses]


def _csv_text(found: Iterable[_Traced], more_phases: Iterable[str]) -> Iterator[str]:
    """A table with one row a step; a phase that was not observed is an empty cell, as is a number that is not known."""
    names = [*(name for name in PHASES if name != "unattributed"), *more_phases]
    rows: list[Sequence[object]] = [(*COLUMNS, *(f"{name}_s" for name in names), "loss")]
    for child, _, window in found:
        if not isinstance(window, Window):
            continue
        empty = (None,) * window.num_steps
        columns = (
            accumulate(window.step_s[:-1], initial=window.start_s),
            window.step_s,
            window.outside_s,
            *(window.account.get(name, empty) for name in names),
            _losses(window),
        )
        fixed = (child, window.index, window.purpose, label(window.levers))
        rows += [(*fixed, step, *cells) for step, cells in enumerate(zip(*columns, strict=True))]
        yield _table(rows)
        rows = []
    yield _table(rows)  # the head, where there was no window


def _table(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _perfetto_text(found: Iterable[_Traced]) -> Iterator[str]:
    """A trace in the event format of Chrome, which Perfetto opens: a track each for windows, steps and phases.

    Losses and memory are counters. Each process is placed by when its recording began.

    Source: "Trace Event Format", Google, 2016: complete events (`X`), counters (`C`) and metadata (`M`), in µs.
    """
    yield f'{HEADS[".json"]} "traceEvents": [\n'
    pid, last, first_unix_s = 0, "", math.nan
    separator = ""
    for child, header, one in found:
        events = []
        if child != last:
            pid, last = pid + 1, child
            first_unix_s = header.started_unix_s if pid == 1 else first_unix_s
            name = f"{header.script or 'a script'} ({child})"
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            for tid, track in _TRACKS.items():
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        shift_s = header.started_unix_s - first_unix_s
        shift_s = shift_s if math.isfinite(shift_s) else 0.0
        if isinstance(one, Window):
            events += _events(one, pid, one.start_s + shift_s)
        elif header.zero_monotonic_s is not None:
            events += _profiled(one, pid, one.zero_s - header.zero_monotonic_s + shift_s)
        yield separator + ",\n".join(json.dumps(event, allow_nan=False) for event in events)
        separator = ",\n"
    yield "\n]}\n"


def _profiled(profile: Profile, pid: int, zero_s: float) -> Iterator[dict[str, Any]]:
    """Profiled steps: what the thread and the device did when; what asked for what has the same `link`."""
    named = set()
    for span in profile.spans():
        tid = _PROFILED[span.kind] + span.lane
        if tid not in named:
            named.add(tid)
            track = _PROFILED_TRACKS.get(tid, f"{profile.device}, stream {span.lane}")
            named_so = {"name": f"profiled: {track}"}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": named_so}
        args = {"link": span.link, "operator": span.operator} if span.link else {}
        times = {"ts": 1e6 * zero_s + span.start_ns / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3}
        yield {"ph": "X", "name": span.name, "pid": pid, "tid": tid, **times, "args": args}


def _events(window: Window, pid: int, begun_s: float) -> Iterator[dict[str, Any]]:
    def lasting(tid: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s)}
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": args}

    end_s = begun_s + math.fsum(window.step_s)
    about = {"window": window.index, "steps": window.num_steps, "observe": window.observe}
    yield lasting(1, f"{window.purpose}: {label(window.levers)}", begun_s, end_s, about)
    start_s = begun_s
    for step, (step_s, loss) in enumerate(zip(window.step_s, _losses(window), strict=True)):
        step_end_s = start_s + step_s
        yield lasting(2, "step", start_s, step_end_s, {"window": window.index, "step": step})
        phase_start_s = start_s
        for name, values in window.account.items():
            if values[step] > 0 and name != "unattributed":
                stop_s = min(phase_start_s + values[step], step_end_s)  # what was counted twice would run into the next
                yield lasting(3, name, phase_start_s, stop_s, {"phase_s": values[step]})
                phase_start_s = stop_s
        if loss is not None:
            yield {"ph": "C", "name": "loss", "pid": pid, "ts": 1e6 * start_s, "args": {"loss": loss}}
        start_s = step_end_s
    if window.peak_memory_bytes is not None:
        args = {"bytes": window.peak_memory_bytes}
        yield {"ph": "C", "name": "peak memory", "pid": pid, "ts": 1e6 * end_s, "args": args}
