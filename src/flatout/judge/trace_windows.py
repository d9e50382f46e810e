"""Which windows lie in the traces of a run folder?

In: a run folder. Out: its trace files, their windows one by one, or `Samples`: every window as a few numbers, so that
a run of any length fits the memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from flatout.errors import RecordError
from flatout.records.trace import OUTSIDE, Header, Window
from flatout.records.trace_file import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some consecutive steps of one window: their mean step, taken apart as far as it was.

    Attributes:
        step_s: Mean seconds of a training step, without evaluation and checkpoints.
        phases_s: Mean seconds by phase, `unattributed` included; empty where phases were not observed.
    """

    step_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSample:
    """One window in which the plain step was taken apart, in a few numbers.

    Attributes:
        index: Counts the windows of its trace.
        whole: Its mean step.
        quarters: The same of its four quarters, in the order of time; fewer where it has fewer steps.
        foreign_fraction: Core time that other processes used; None where not observed.
        recompilations: Compilations that fell into it.
    """

    index: int
    whole: Span
    quarters: tuple[Span, ...]
    foreign_fraction: float | None = None
    recompilations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What the traces of a run folder hold of the plain step's phases.

    Attributes:
        windows: Those in which it was taken apart, in the order of time.
        remarks: What the reader must know: traces that are missing or torn.
    """

    windows: tuple[WindowSample, ...] = ()
    remarks: tuple[str, ...] = ()

    def calmest(self, num: int) -> tuple[WindowSample, ...]:
        """So many of the windows: those that were disturbed least."""
        found = self.windows
        ranked = sorted(range(len(found)), key=lambda n: (found[n].recompilations, found[n].foreign_fraction or 0.0))
        return tuple(found[number] for number in sorted(ranked[:num]))


def trace_paths(folder: Path) -> list[Path]:
    """The traces of a run folder, in the order in which their processes started."""

    def order(path: Path) -> tuple[int, str]:
        number = re.fullmatch(r"trace-(\d+)\.jsonl", path.name)
        return (int(number[1]) if number else 0, path.name)

    return sorted(folder.glob("trace-*.jsonl"), key=order)


def gather(folder: Path) -> Samples:
    """The windows of every trace in a folder; what cannot be read is said in the remarks."""
    windows: list[WindowSample] = []
    remarks: list[str] = []
    paths = trace_paths(folder)
    if not paths:
        remarks.append("the traces of this run are not there any more")
    for path in paths:
        try:
            for _, window in each_window(path, remarks):
                if window.purpose == "anatomy" and window.observe == "phases" and window.step_s:
                    windows.append(_sample(window))
        except RecordError as problem:
            remarks.append(f"{problem.error}: {problem.cause}")
    return Samples(windows=tuple(windows), remarks=tuple(remarks))


def each_window(path: Path, remarks: list[str]) -> Iterator[tuple[Header, Window]]:
    """The windows of one trace, one by one, each with the trace's header.

    Remarks say that its last line was cut, or how many windows have more or fewer times than steps and were left out.

    Raises:
        RecordError: See `flatout.records.trace_file.Reader`.
    """
    header: Header | None = None
    reader = Reader(path)
    num_odd = 0
    for record in reader:
        if isinstance(record, Header):
            header = record
        elif isinstance(record, Window) and header is not None:
            if any(len(times) != record.num_steps for times in (record.outside_s, *record.account.values())):
                num_odd += 1
            else:
                yield header, record
    if num_odd:
        remarks.append(f"windows of `{path.name}` left out: {num_odd} with more or fewer times than steps")
    if reader.torn:
        remarks.append(f"`{path.name}` is cut: its last line is left out")


def _sample(window: Window) -> WindowSample:
    num = window.num_steps
    cuts = [round(part * num / min(num, 4)) for part in range(min(num, 4) + 1)]
    return WindowSample(
        index=window.index,
        whole=_span(window, 0, num),
        quarters=tuple(_span(window, first, last) for first, last in pairwise(cuts)),
        foreign_fraction=window.foreign_fraction,
        recompilations=window.recompilations,
    )


def _span(window: Window, first: int, last: int) -> Span:
    def mean_s(values: tuple[float, ...]) -> float:
        return math.fsum(values[first:last]) / (last - first)

    step_s = mean_s(window.step_s) - mean_s(window.outside_s)
    phases_s = {name: mean_s(values) for name, values in window.account.items() if name != "unattributed"}
    inside_s = math.fsum(value for name, value in phases_s.items() if name not in OUTSIDE)
    return Span(step_s=step_s, phases_s={**phases_s, "unattributed": step_s - inside_s})
