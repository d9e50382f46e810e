"""What do the page's figures look like? Where a step goes, the steps in time, and what was tried.

In: a `Result`. Out: SVG for the page, or None where there is nothing to draw. Each figure says the same in words
(`aria-label`); its caption and its numbers as a table are beside it in the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from flatout.judge.anatomy import Anatomy
from flatout.judge.result import Result
from flatout.records.trace import PHASES
from flatout.report import forest as forests
from flatout.report import ticks, words
from flatout.report.forest import Line
from flatout.report.svg import LETTER, Canvas, both, colour
from flatout.report.thinned import Dot, Kind, thin
from flatout.report.tried import Row, ends, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 40
"""Trials in the figure; the table below it has all."""

# -- where a step goes ---------------------------------------------------------------------------------------------


def phase_colour(name: str) -> str:
    """The custom property that colours a phase; unknown phases share one."""
    return name if name in PHASES and name not in ("evaluation", "checkpoint") else "other"


def step(result: Result) -> Markup | None:
    """The plain step, and the winner's below it on the same scale, as stacked bars."""
    bars = [("taken apart" if result.diagnosis.contradictions else "plain", result.anatomy)]
    if result.tuned_anatomy is not None and result.plan is not None:
        bars = [("before", result.anatomy), ("with the plan", result.tuned_anatomy)]
    return stacked(bars)


def stacked(bars: Sequence[tuple[str, Anatomy]]) -> Markup | None:
    """Steps by name as stacked bars on one scale; None where one of them has no time."""
    if not all(words.known(anatomy.step_s) and anatomy.step_s > 0 for _, anatomy in bars):
        return None
    label = ". ".join(f"{words.sentence(name)}: {_step_words(anatomy)}" for name, anatomy in bars)
    height = 70 * len(bars) + 40
    return both("step", label, (height, height), lambda canvas: _draw_step(canvas, bars))


def _step_words(anatomy: Anatomy) -> str:
    parts = ", ".join(f"{name} {words.share(anatomy.share(name))}" for name in anatomy.phases_s)
    return f"{words.seconds(anatomy.step_s)} a step, of which {parts}"


def _draw_step(canvas: Canvas, bars: Sequence[tuple[str, Anatomy]]) -> None:
    axes = canvas.axes(1, 0, 14, 38)
    longest_s = max(anatomy.step_s for _, anatomy in bars)
    axes.set_xlim(0, longest_s)
    axes.set_ylim(canvas.height - 38, 0)
    per_unit_s = longest_s / (canvas.width - 15)
    for number, (name, anatomy) in enumerate(bars):
        top = 70 * number
        canvas.write(1, top + 12, name, weight="bold")
        canvas.write(
            1 + LETTER * (len(name) + 2), top + 12, f"{words.seconds(anatomy.step_s)} a step", color=colour("soft")
        )
        left_s = 0.0
        for phase, value_s in anatomy.phases_s.items():
            if not (words.known(value_s) and value_s > 0):
                continue
            fill = colour(phase_colour(phase))
            axes.barh(top + 42, value_s, 34, left=left_s, color=fill, edgecolor=colour("paper"), linewidth=1.5)
            room = value_s / per_unit_s / LETTER
            text = phase if len(phase) + 1 <= room else ""
            axes.text(left_s + value_s / 2, top + 42, text, ha="center", va="center_baseline", color=colour("on-phase"))
            left_s += value_s
        axes.barh(top + 42, left_s, 34, color="none", edgecolor=colour("soft"), linewidth=0.8)
    places = ticks.even(longest_s, 4 if canvas.narrow else 7)
    ticks.place(axes.xaxis, places, words.seconds)
    axes.set_yticks([])
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    if places[-1] > 0.97 * longest_s:  # else half of it lies outside of the drawing
        axes.get_xticklabels()[-1].set_horizontalalignment("right")


# -- the steps in time ---------------------------------------------------------------------------------------------


def timeline(found: Sequence[Dot]) -> Markup | None:
    """Every measured step as a dot; thinned, but with all outliers."""
    if len(found) < 2:
        return None
    kinds = [kind for kind in ("plain", "try", "plan", "aside") if any(dot.kind == kind for dot in found)]
    label = (
        f"{words.plural(len(found), 'step')} in {words.duration(max(d.start_s for d in found))}, the fastest "
        f"{words.seconds(min(d.step_s for d in found))}, the slowest {words.seconds(max(d.step_s for d in found))}"
    )
    return both("timeline", label, (300, 270), lambda canvas: _draw_timeline(canvas, found, kinds))


def _draw_timeline(canvas: Canvas, found: Sequence[Dot], kinds: Sequence[str]) -> None:
    axes = canvas.axes(58, 10, 12, 40)
    shown = thin(found, slices=canvas.width // 4)
    for kind in ("aside", "plain", "try", "plan"):
        for outside in (False, True):
            _dots(axes, [d for d in shown if d.kind == kind and d.outside == outside], kind, hollow=outside)
    lowest, highest = min(d.step_s for d in found), max(d.step_s for d in found)
    if highest > 4 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.25, highest * 1.25)
        ticks.place(axes.yaxis, ticks.logarithmic(lowest / 1.25, highest * 1.25), words.seconds)
    else:
        axes.set_ylim(0, highest * 1.08)
        ticks.place(axes.yaxis, ticks.even(highest * 1.08, 5), words.seconds)
    first, last = min(d.start_s for d in found), max(d.start_s for d in found)
    margin = 0.015 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    ticks.place(axes.xaxis, ticks.clock_times(first, last, 4 if canvas.narrow else 8), ticks.clock)
    axes.grid(axis="y", color=colour("line"), linewidth=0.7)
    axes.set_axisbelow(True)


def _dots(axes: Axes, found: Sequence[Dot], kind: Kind, *, hollow: bool) -> None:
    """All dots of one kind as one path of round caps, a tenth of the size of markers."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not found:
        return
    points = [point for dot in found for point in ((dot.start_s, dot.step_s),) * 2]
    path = Path(points, [Path.MOVETO, Path.LINETO] * len(found))
    sizes = ((7.0, kind), (4.0, "paper")) if hollow else ((4.0, kind),)
    for size, name in sizes:
        look = {"edgecolor": colour(name), "linewidth": size, "capstyle": "round", "facecolor": "none"}
        axes.add_patch(PathPatch(path, **look))


# -- what was tried ------------------------------------------------------------------------------------------------


def forest(result: Result) -> Markup | None:
    """Each trial's ratio with its 95 % interval, around 1."""
    noise = result.noise
    band = (noise.low, noise.high) if noise is not None else None
    return forests.forest("tried", [_line(row) for row in rows(result, MOST_ROWS)], band=band)


def _line(row: Row) -> Line:
    trial = row.trial
    ratio, low, high = (math.nan if x is None else x for x in (trial.ratio, trial.ratio_low, trial.ratio_high))
    return Line(
        name=row.words, whole_name=trial.label, ratio=ratio, low=low, high=high, ends=ends(trial),
        outcome=trial.outcome, mark=row.mark, chosen=row.chosen, depth=row.depth,
    )  # fmt: skip
