"""What can be done with runs that are over? Show one, hold two beside each other, write the steps of one to a file.

In: names of run folders. Out: a `Result`, a `Contrast`, or a file and what went into it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import RecordError, UsageError, cannot_write
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written for other programs.

    Attributes:
        file: Where.
        run: The run folder.
        num_steps: Steps in it.
        num_windows: Windows that they come from.
        remarks: What the reader must know, e.g. that a trace was cut.
    """

    file: str
    run: str
    num_steps: int
    num_windows: int
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
        RecordError: The run folder holds no trace with a step, or one that is broken.
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
    sizes: list[int] = []
    remarks: list[str] = []

    def stretches() -> Iterator[Stretch]:
        for trace in samples.trace_paths(place):
            for header, window in samples.each_window(trace, remarks):
                if window.step_s:
                    sizes.append(window.num_steps)
                    yield exports.Stretch(child=trace.stem.removeprefix("trace-"), header=header, window=window)

    def text() -> Iterator[str]:
        yield from exports.csv_text(stretches()) if kind == ".csv" else exports.perfetto_text(stretches())
        if not sizes:
            raise RecordError(
                f"there is no step to export in `{place}`",
                cause="; ".join(remarks) or "its traces are gone, or the run ended before a step was recorded",
                hint="`flatout why SCRIPT` records steps",
            )

    try:
        output_file.write_whole(text(), path)
    except OSError as problem:
        raise cannot_write(path, problem) from None
    return Exported(
        file=str(path), run=str(place), num_steps=sum(sizes), num_windows=len(sizes), remarks=tuple(remarks)
    )


def written(done: Exported) -> View:
    """What is shown of a file that was written for other programs."""
    from flatout.report import words
    from flatout.report.view import Row, View

    what = f"{words.plural(done.num_steps, 'step')} of {words.plural(done.num_windows, 'window')}"
    rows = [Row(label="written", value=done.file, note=f": {what}")]
    rows += [Row(label="mind", value=remark, tone="caution") for remark in done.remarks]
    if done.file.lower().endswith(".json"):
        note = "at https://ui.perfetto.dev, or `chrome://tracing`; it stays on your machine"
        rows.append(Row(label="open it", note=note))
    again = f"flatout report {shlex.quote(str(words.nearby(Path(done.run))))}"
    return View(command="flatout report", title="", verdict=tuple(rows), next=(again,))
