"""What can be done with runs that are over? Show one, hold two beside each other, write the steps of one to a file.

In: names of run folders. Out: a `Result`, a `Contrast`, or a file and what went into it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from errno import EDQUOT, ENOENT, ENOSPC
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import MachineError, RecordError, UsageError, cannot_write
from flatout.judge import contrast as contrasts
from flatout.judge import proof_file, rank_steps, result, samples
from flatout.records import output_file
from flatout.run import folder

if TYPE_CHECKING:
    from flatout.judge.contrast import Contrast
    from flatout.judge.proof import Proof
    from flatout.judge.rank_steps import RankAnatomy
    from flatout.judge.result import Result
    from flatout.report.export import Stretch
    from flatout.report.view import View


PERFETTO_BYTES = 500 * 10**6
"""From here on a trace may not fit the 2 GB of memory that a browser typically gives the page of Perfetto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written for other programs.

    Attributes:
        file: Where.
        run: The run folder.
        num_steps: Steps in it.
        num_windows: Windows that they come from.
        num_children: Processes that made them.
        from_traces: Whether the traces of the run folder were there; else the steps come from `result.json`, which has
            no phases, losses and memory.
        remarks: What the reader must know, e.g. windows that were left out.
    """

    file: str
    run: str
    num_steps: int
    num_windows: int
    num_children: int
    from_traces: bool
    remarks: tuple[str, ...] = ()


def report(run: str | None = None) -> Result:
    """The result of a run folder; the newest without a name."""
    place = folder.find(folder.working_folder(), run)
    return replace(result.load(place), run=str(place))


def record(run: str | None = None) -> Result | Proof | RankAnatomy:
    """What a run folder holds, of whatever kind; the newest without a name.

    Raises:
        UsageError: There is no such run.
        RecordError: It holds nothing that can be shown, or what it holds cannot be read.
    """
    place = folder.find(folder.working_folder(), run)
    if (place / proof_file.FILE).exists():
        return replace(proof_file.load(place), run=str(place))
    if (place / rank_steps.FILE).exists():
        return replace(rank_steps.load(place), run=str(place))
    return report(run)


def contrast(first: str, second: str) -> Contrast:
    """The results of two run folders side by side: what changed, what did not, and what differs besides time.

    Raises:
        UsageError: There is no such run, or both are the same.
        RecordError: One of them holds no result.
    """
    places = [folder.find(folder.working_folder(), name) for name in (first, second)]
    if places[0].resolve() == places[1].resolve():
        raise UsageError(
            f"`{first}` and `{second}` are the same run",
            cause="a run does not differ from itself",
            hint="`ls .flatout` lists the others",
        )
    one, other = (report(str(place)) for place in places)
    return contrasts.contrast(one, other, *(samples.gather(place) for place in places))


def export(run: str | None, path: Path) -> Exported:
    """Write every step of a run to a file: `.csv` is a table, `.json` a trace for Perfetto.

    An earlier export may be written over, any other file may not.

    Raises:
        UsageError: The file's name ends otherwise, or the file is there and is no export; there is no such run.
        RecordError: The run folder holds neither a trace nor a result, or one that is broken, or no step.
        MachineError: The file cannot be written.
    """
    from flatout.report import export as exports

    kind = path.suffix.lower()
    if kind not in exports.HEADS:
        raise UsageError(
            f"`--export {path}` ends in no format that can be written",
            cause="the ending decides: `.csv` is a table with one row a step, `.json` a trace for Perfetto",
            hint="e.g. `--export steps.csv`",
        )
    mark = exports.HEADS[kind].encode()
    output_file.check(path, output_file.Kind(name="export", mark=mark), option="--export")
    place = folder.find(folder.working_folder(), run)
    source = _Source(place)
    found = source.stretches()
    text = exports.csv_text(found, source.more_phases()) if kind == ".csv" else exports.perfetto_text(found)
    _write(text, path, source)
    return Exported(
        file=str(path),
        run=str(place),
        num_steps=source.num_steps,
        num_windows=source.num_windows,
        num_children=len(source.children),
        from_traces=bool(source.paths),
        remarks=(*source.remarks(), *_too_large(path, kind)),
    )


def written(done: Exported) -> View:
    """What is shown of a file that was written for other programs."""
    from flatout.report import words
    from flatout.report.view import Row, View

    what = (words.plural(done.num_steps, "step"), words.plural(done.num_windows, "window"))
    processes = f"{done.num_children:,} process{'' if done.num_children == 1 else 'es'}"
    rows = [Row(label="written", value=done.file, note=f": {' of '.join(what)}, from {processes}")]
    rows += [Row(label="mind", value=remark, tone="caution") for remark in done.remarks]
    if done.file.lower().endswith(".json"):
        note = "at https://ui.perfetto.dev, or `chrome://tracing`; it stays on your machine"
        rows.append(Row(label="open it", note=note))
    again = f"flatout report {shlex.quote(str(words.nearby(Path(done.run))))}"
    return View(command="flatout report", title="", verdict=tuple(rows), next=(again,))


def _too_large(path: Path, kind: str) -> list[str]:
    """Source: perfetto.dev/docs/visualization/large-traces: 2 GB of memory are typical, and a trace takes more than its
    file; `trace_processor --httpd` opens it natively.
    """  # noqa: D205
    size = path.stat().st_size
    large = kind == ".json" and size > PERFETTO_BYTES
    hint = "may be more than a browser's memory holds; `trace_processor --httpd FILE` beside the page opens it"
    return [f"the file has {size / 1e9:.1f} GB, which {hint}"] if large else []


def _write(text: Iterator[str], path: Path, source: _Source) -> None:
    """All of it or nothing."""
    try:
        output_file.write_whole(_with_steps(text, source), path)
    except OSError as problem:
        found = cannot_write(path, problem)
        hint = found.hint if problem.errno in (ENOENT, ENOSPC, EDQUOT) else "`--export FILE` in a folder of yours"
        raise MachineError(found.error, cause=found.cause, hint=hint) from None


def _with_steps(text: Iterator[str], source: _Source) -> Iterator[str]:
    """The text; in its end it is known whether there was a step in it."""
    yield from text
    if not source.num_steps:
        raise RecordError(
            f"there is no step to export in `{source.place}`",
            cause="; ".join(source.remarks()) or "the run ended before a step was recorded",
            hint="`flatout why SCRIPT` records steps",
        )


class _Source:
    """The steps of a run folder, from its traces or else from its result, counted while they are read."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.paths = samples.trace_paths(place)
        self.num_steps = self.num_windows = 0
        self.children: set[str] = set()
        self._faults: list[str] = []
        self._cuts: list[str] = []
        self._result = report(str(place)) if not self.paths else None

    def stretches(self) -> Iterator[Stretch]:
        """Each window with steps in which every time is possible."""
        for one in self._traced(self._cuts) if self._result is None else self._of_result(self._result):
            if fault := samples.fault_of(one.window):
                self._faults.append(f"window {one.window.index} of `{one.child}` is left out: {fault}")
            elif one.window.step_s:
                self.num_steps += one.window.num_steps
                self.num_windows += 1
                self.children.add(one.child)
                yield one

    def more_phases(self) -> tuple[str, ...]:
        """Phases that this version does not know; the traces are read once more for them."""
        from flatout.records.trace import PHASES

        return tuple(sorted({name for one in self._traced() for name in one.window.phases} - {*PHASES}))

    def remarks(self) -> list[str]:
        """What was left out, and where the steps come from."""
        missing = ["the run folder has no trace: the steps are those of `result.json`, without phases and losses"]
        return [*(missing if not self.paths else []), *self._cuts, *samples.some_faults(self._faults)]

    def _traced(self, cuts: list[str] | None = None) -> Iterator[Stretch]:
        from flatout.report.export import Stretch

        for path in self.paths:
            for header, window in samples.each_window(path, cuts):
                yield Stretch(child=samples.child_of(path), header=header, window=window)

    def _of_result(self, found: Result) -> Iterator[Stretch]:
        from flatout.records.trace import Window
        from flatout.report.export import Stretch

        parts = groupby(found.timeline, key=lambda step: (step.group, step.label))
        for index, ((group, name), steps) in enumerate(parts):
            rows = tuple(steps)
            window = Window(
                index=index,
                purpose=group,
                levers={} if name == "plain" else {name: {}},
                observe="ends",
                step_s=tuple(step.step_s for step in rows),
                outside_s=tuple(step.outside_s for step in rows),
                start_s=rows[0].start_s,
            )
            yield Stretch(child="result", header=found.header, window=window)
