"""Which raw samples stand behind what was found? The windows and comparisons in the traces of a run folder.

In: a run folder. Out: its trace files, or `Samples`: every window as a few numbers, so that a run of any length fits
the memory. A window with times that no clock gives is left out, and that is said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from flatout.errors import RecordError
from flatout.records.plan import label
from flatout.records.trace import OUTSIDE, Agreement, Scaling, Window
from flatout.records.trace_file import Reader

MOST_REMARKS = 5
"""Windows that are named one by one where they are left out; of more only the number is said."""


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
    """One window in a few numbers.

    Attributes:
        child: The process that made it, as its trace is named.
        index: Counts the windows of that trace.
        purpose: Why it was measured.
        levers: What was engaged, as people read it.
        observe: `ends`, `phases`, `stacks` or `reads`.
        start_s: On that trace's clock.
        num_steps: How many steps it holds.
        whole: Its mean step.
        quarters: The same of its four quarters, in the order of time; fewer where it has fewer steps.
        foreign_fraction: Core time that other processes used; None where not observed.
        recompilations: Compilations that fell into it.
    """

    child: str
    index: int
    purpose: str
    levers: str
    observe: str
    start_s: float
    num_steps: int
    whole: Span
    quarters: tuple[Span, ...]
    foreign_fraction: float | None = None
    recompilations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What the traces of a run folder hold.

    Attributes:
        windows: Every window, in the order of time.
        agreements: Every comparison of numbers.
        scalings: Model calls replayed at their own batch and at half of it.
        remarks: What the reader must know: traces that are missing or torn, windows that were left out.
    """

    windows: tuple[WindowSample, ...] = ()
    agreements: tuple[Agreement, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    remarks: tuple[str, ...] = ()

    def of(self, purpose: str, *, levers: str | None = None, observe: str | None = None) -> tuple[WindowSample, ...]:
        """The windows of one purpose, under these levers, so observed."""
        return tuple(
            w
            for w in self.windows
            if w.purpose == purpose and levers in (None, w.levers) and observe in (None, w.observe)
        )

    def calmest(self, num: int) -> tuple[WindowSample, ...]:
        """So many of the windows in which the plain step was taken apart: those that were disturbed least."""
        found = self.of("anatomy", observe="phases")
        ranked = sorted(range(len(found)), key=lambda n: (found[n].recompilations, found[n].foreign_fraction or 0.0))
        return tuple(found[number] for number in sorted(ranked[:num]))


def trace_paths(folder: Path) -> list[Path]:
    """The traces of a run folder, in the order in which their processes started."""

    def order(path: Path) -> tuple[int, str]:
        number = re.fullmatch(r"trace-(\d+)\.jsonl", path.name)
        return (int(number[1]) if number else 0, path.name)

    return sorted(folder.glob("trace-*.jsonl"), key=order)


def fault_of(window: Window) -> str:
    """What is impossible about a window's times, or empty.

    >>> fault_of(Window(index=0, purpose="run", levers={}, observe="ends", step_s=(0.1, -0.1), outside_s=(0.0, 0.0),
    ...                 start_s=0.0))
    'a step of -0.1 s'
    """
    if len(window.outside_s) != len(window.step_s):
        return f"{len(window.step_s)} steps but {len(window.outside_s)} times between them"
    if not math.isfinite(window.start_s):
        return f"a start at {window.start_s} s"
    for name, values in (("step", window.step_s), ("time between steps", window.outside_s), *window.phases.items()):
        bad = next((x for x in values if not (math.isfinite(x) and x >= 0)), None)
        if bad is not None:
            return f"a {name} of {bad:g} s"
        if len(values) != len(window.step_s):
            return f"{len(window.step_s)} steps but {len(values)} of `{name}`"
    return ""


def gather(folder: Path) -> Samples:
    """Every window of every trace in a folder; what cannot be read is said in the remarks."""
    windows: list[WindowSample] = []
    agreements: list[Agreement] = []
    scalings: list[Scaling] = []
    remarks: list[str] = []
    faults: list[str] = []
    paths = trace_paths(folder)
    if not paths:
        remarks.append("the traces of this run are not there any more")
    for path in paths:
        reader = Reader(path)
        try:
            for record in reader:
                if isinstance(record, Window):
                    if fault := fault_of(record):
                        faults.append(f"window {record.index} of `{path.name}` is left out: {fault}")
                    elif record.step_s:
                        windows.append(_sample(path.stem.removeprefix("trace-"), record))
                elif isinstance(record, Agreement):
                    agreements.append(record)
                elif isinstance(record, Scaling):
                    scalings.append(record)
        except RecordError as problem:
            remarks.append(f"{problem.error}: {problem.cause}")
        if reader.torn:
            remarks.append(f"`{path.name}` is cut: its last line is left out")
    return Samples(
        windows=tuple(windows), agreements=tuple(agreements), scalings=tuple(scalings),
        remarks=(*remarks, *some_faults(faults)),
    )  # fmt: skip


def some_faults(faults: list[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(faults) - MOST_REMARKS
    return [*faults[:MOST_REMARKS], *([f"{more:,} more windows are left out for such times"] if more > 0 else [])]


def _sample(child: str, window: Window) -> WindowSample:
    num = window.num_steps
    cuts = [round(part * num / min(num, 4)) for part in range(min(num, 4) + 1)]
    return WindowSample(
        child=child,
        index=window.index,
        purpose=window.purpose,
        levers=label(window.levers),
        observe=window.observe,
        start_s=window.start_s,
        num_steps=num,
        whole=_span(window, 0, num),
        quarters=tuple(_span(window, first, last) for first, last in pairwise(cuts)),
        foreign_fraction=window.foreign_fraction,
        recompilations=window.recompilations,
    )


def _span(window: Window, first: int, last: int) -> Span:
    num = last - first

    def mean_s(values: tuple[float, ...]) -> float:
        return math.fsum(values[first:last]) / num

    step_s = mean_s(window.step_s) - mean_s(window.outside_s)
    if window.observe != "phases":
        return Span(step_s=step_s)
    phases_s = {name: mean_s(values) for name, values in window.phases.items() if name != "unattributed"}
    inside_s = math.fsum(value for name, value in phases_s.items() if name not in OUTSIDE)
    return Span(step_s=step_s, phases_s={**phases_s, "unattributed": step_s - inside_s})
