"""What do the figures of a result draw? Where a step goes, the steps in time, what was tried, and the roofline.

In: a `Result`, or anatomies. Out: a `Drawing`, or None where there is nothing to draw. Each says the same in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.judge.anatomy import Anatomy
from flatout.judge.result import Result
from flatout.judge.roofline import Standing, standing
from flatout.records.trace import OUTSIDE, PHASES
from flatout.report import ticks, words
from flatout.report.drawing import Axis, Bar, Bars, Dots, Intervals, Line, Note, Path, Plot
from flatout.report.thinned import Dot, thin
from flatout.report.tried import Shown, ends, rows

MOST_ROWS = 40
"""Trials in the figure; the table below it has all."""

MOST_NAMED = 7
"""Operations with their names in the roofline."""

SLICES = 180
"""Parts of the time in each of which a few steps are drawn."""


def phase_colour(name: str) -> str:
    """The custom property that colours a phase; unknown phases share one."""
    return name if name in PHASES and name not in OUTSIDE else "other"


def step(result: Result) -> Bars | None:
    """The plain step, and the winner's below it on the same scale."""
    bars = [("taken apart" if result.diagnosis.contradictions else "plain", result.anatomy)]
    if result.tuned_anatomy is not None and result.plan is not None:
        bars = [("before", result.anatomy), ("with the plan", result.tuned_anatomy)]
    return stacked(bars)


def stacked(bars: Sequence[tuple[str, Anatomy]]) -> Bars | None:
    """Steps by name as bars on one scale; None where one of them has no time."""
    if not all(words.known(anatomy.step_s) and anatomy.step_s > 0 for _, anatomy in bars):
        return None
    found = tuple(
        Bar(
            name=name,
            total=f"{words.seconds(anatomy.step_s)} a step",
            parts=tuple((phase, phase_colour(phase), value_s) for phase, value_s in anatomy.phases_s.items()),
        )
        for name, anatomy in bars
    )
    label = ". ".join(f"{words.sentence(name)}: {_step_words(anatomy)}" for name, anatomy in bars)
    return Bars(name="step", label=label, bars=found) if all(b.length > 0 for b in found) else None


def _step_words(anatomy: Anatomy) -> str:
    parts = ", ".join(f"{name} {words.share(anatomy.share(name))}" for name in anatomy.phases_s)
    return f"{words.seconds(anatomy.step_s)} a step, of which {parts}"


def timeline(found: Sequence[Dot]) -> Plot | None:
    """Every measured step as a dot; thinned, but with all outliers."""
    if len(found) < 2:
        return None
    first, last = min(d.start_s for d in found), max(d.start_s for d in found)
    lowest, highest = min(d.step_s for d in found), max(d.step_s for d in found)
    label = (
        f"{words.plural(len(found), 'step')} in {words.duration(last)}, the fastest {words.seconds(lowest)}, the "
        f"slowest {words.seconds(highest)}"
    )
    margin = 0.015 * (last - first) or 0.5
    log = highest > 4 * lowest
    low, high = (lowest / 1.25, highest * 1.25) if log else (0.0, highest * 1.08)
    drawn = thin(found, slices=SLICES)
    looks = [(kind, outside) for kind in ("aside", "plain", "try", "plan") for outside in (False, True)]
    groups = [
        (look, tuple((d.start_s, d.step_s) for d in drawn if (d.kind, d.outside) == look)) for look in looks
    ]  # fmt: skip
    return Plot(
        name="timeline",
        label=label,
        x=Axis(low=first - margin, high=last + margin, ticks=lambda most: ticks.times(first, last, most)),
        y=Axis(low=low, high=high, log=log, ticks=lambda most: ticks.said(
            ticks.logarithmic(low, high) if log else ticks.between(0.0, high, most), words.seconds)),
        dots=tuple(Dots(points=points, colour=kind, hollow=outside) for (kind, outside), points in groups if points),
    )  # fmt: skip


def forest(result: Result) -> Intervals | None:
    """Each trial's ratio with its 95 % interval, around 1."""
    noise = result.noise
    known = noise is not None and words.known(noise.low) and words.known(noise.high)
    lines = [(row, _line(row)) for row in rows(result)[:MOST_ROWS]]
    shown = [(row, line) for row, line in lines if line is not None]
    if not shown:
        return None
    label = "; ".join(
        f"{row.trial.label} {words.times(row.trial.ratio)} {ends(row.trial)}".rstrip() + f", {row.trial.outcome}"
        for row, _ in shown
    )
    return Intervals(
        name="tried",
        label=label,
        lines=tuple(line for _, line in shown),
        zero=1.0,
        band=(noise.low, noise.high) if known and noise is not None else None,
        ends=("← slower than plain", "faster →"),
        ticks=lambda low, high, most: ticks.said(ticks.ratios(low, high, most), lambda x: f"{x:,g}x"),
    )


def _line(row: Shown) -> Line | None:
    trial = row.trial
    found = [math.nan if x is None else x for x in (trial.ratio, trial.ratio_low, trial.ratio_high)]
    if not all(words.known(x) and x > 0 for x in found):
        return None
    value, low, high = found
    if not ends(trial):
        low = high = math.nan
    colour = row.mark if row.mark != "no" or trial.outcome == "slower" else "even"
    shapes = {"yes": "dot", "even": "ring", "no": "square", "never": "cross"}
    return Line(
        name=row.words, value=value, low=low, high=high, said=f"{words.ratio(value)} {ends(trial)}".rstrip(),
        colour=colour, shape=shapes[row.mark], bold=row.chosen, depth=row.depth,  # type: ignore[arg-type]
    )  # fmt: skip


def roofline(result: Result) -> Plot | None:
    """The heaviest operations under the machine's measured ceilings; None where no operation can be placed.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
    """
    found, census = result.ceilings, result.census
    bandwidth, peaks = (found.bandwidth(), found.peaks()) if found else (None, {})
    stands = [standing(op, found) for op in (census.operations if census else ())] if found else []
    placed = [s for s in stands if s is not None and s.operation.flops > 0 and s.operation.moved_bytes > 0]
    if found is None or bandwidth is None or not peaks or not placed:
        return None
    placed.sort(key=lambda s: -s.operation.self_s)
    cache = found.get("memory_cache")
    slopes = [(words.ceiling(bandwidth.name), bandwidth.value), *([("cache", cache.value)] if cache else [])]
    roofs = [(dtype, peak.value) for dtype, peak in peaks.items()]
    at = [(s.operation.flops / s.operation.moved_bytes, s.operation.flops / s.operation.self_s) for s in placed]
    ridge = max(value for _, value in roofs) / bandwidth.value
    x = (min(0.5, *(place for place, _ in at)) / 2, max(ridge * 4, *(place * 3 for place, _ in at), 1.0))
    y = (min(rate for _, rate in at) / 4, max(*(v for _, v in roofs), *(rate for _, rate in at)) * 2.4)
    paths, notes = _lines(slopes, roofs, x, y)
    total_s = math.fsum(s.operation.self_s for s in placed)
    return Plot(
        name="roofline", label=_roofline_words(slopes, roofs, placed),
        x=Axis(low=x[0], high=x[1], log=True, name="FLOP per byte moved",
               ticks=lambda most: ticks.said(ticks.logarithmic(*x, most), lambda place: f"{place:,g}")),
        y=Axis(low=y[0], high=y[1], log=True,
               ticks=lambda most: ticks.said(ticks.logarithmic(*y, most), lambda rate: words.scaled(rate, "FLOP/s"))),
        heights=(380, 340), left=82, paths=paths,
        dots=tuple(
            Dots(points=(one,), colour="yes", size=5 + 16 * math.sqrt(s.operation.self_s / total_s))
            for s, one in zip(placed, at, strict=True)
        ),
        notes=(*notes, *(
            Note(x=one[0], y=one[1], text=s.operation.name, wide=number > 3)
            for number, (s, one) in enumerate(zip(placed[:MOST_NAMED], at, strict=False))
        )),
    )  # fmt: skip


Limits = Sequence[tuple[str, float]]
"""What a line is called, and its limit."""


def _lines(
    slopes: Limits, roofs: Limits, x: tuple[float, float], y: tuple[float, float]
) -> tuple[tuple[Path, ...], list[Note]]:
    """The lines of the roofline, and what they are called."""
    paths = []
    notes = [Note(x=x[1], y=roof, text=f"{name} {words.limit(roof, 'FLOP/s')}", side="roof") for name, roof in roofs]
    for name, slope in slopes:
        first = max(x[0], y[0] / slope)
        text = f"{name} {words.limit(slope, 'B/s')}"
        notes.append(Note(x=first * 1.25, y=first * 1.25 * slope, text=text, side="slope"))
        paths += [
            Path(points=tuple((place, min(roof, place * slope)) for place in (first, roof / slope, x[1])))
            for _, roof in roofs
        ]
    return tuple(paths), notes


def _roofline_words(slopes: Limits, roofs: Limits, placed: Sequence[Standing]) -> str:
    top, above = placed[0].operation, [s.operation.name for s in placed if s.is_above()]
    limits = [f"{name} {words.limit(value, 'B/s')}" for name, value in slopes]
    limits += [f"{name} {words.limit(value, 'FLOP/s')}" for name, value in roofs]
    return (
        f"Ceilings: {', '.join(limits)}. {words.plural(len(placed) - len(above), 'operation')} below them; the "
        f"heaviest, {top.name}, does {words.scaled(top.flops / top.self_s, 'FLOP/s')}"
        + (f". Above them by more than their spread: {', '.join(above)}" if above else "")
    )
