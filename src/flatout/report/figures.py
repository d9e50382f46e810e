"""What do the page's figures look like? Where a step goes, the steps in time, and what was tried.

In: a `Result`. Out: SVG for the page, or None where there is nothing to draw. Each figure says the same in words
(`aria-label`); its caption and its numbers as a table are beside it in the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from flatout.anatomy import Anatomy
from flatout.report import ticks, words
from flatout.report.svg import FONT, LETTER, Canvas, both, colour, cut
from flatout.report.thinned import Dot, Kind, thin
from flatout.report.tried import Row, ends, rows
from flatout.result import Result
from flatout.trace import PHASES

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
    bars = [("plain", result.anatomy)]
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
    shown = [row for row in rows(result, MOST_ROWS) if _drawable(row)]
    if not shown:
        return None
    label = "; ".join(
        f"{t.label} {words.times(t.ratio)} {ends(t)}".rstrip() + f", {t.outcome}" for t in (row.trial for row in shown)
    )
    heights = (28 * len(shown) + 58, 46 * len(shown) + 58)
    return both("tried", label, heights, lambda canvas: _draw_forest(canvas, result, shown))


def _drawable(row: Row) -> bool:
    trial = row.trial
    return all(x is not None and words.known(x) and x > 0 for x in (trial.ratio, trial.ratio_low, trial.ratio_high))


def _draw_forest(canvas: Canvas, result: Result, shown: Sequence[Row]) -> None:
    left, right = (16, 16) if canvas.narrow else (236, 134)
    axes = canvas.axes(left, 10, right, 48)
    each = 46 if canvas.narrow else 28
    low = min([0.9, *(row.trial.ratio_low or 1.0 for row in shown)]) / 1.06
    high = max([1.12, *(row.trial.ratio_high or 1.0 for row in shown)]) * 1.06
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(each * len(shown), 0)
    for number, row in enumerate(shown):
        y = each * number + (31 if canvas.narrow else 14)
        _one(axes, result, (y - 10, y + 10) if canvas.narrow else (each * number, each * (number + 1)))
        _interval(axes, row, y)
        _names(canvas, row, 10 + each * number + (11 if canvas.narrow else 14))
    ticks.place(axes.xaxis, ticks.ratios(low, high, 5 if canvas.narrow else 8), lambda x: f"{x:,g}x")
    axes.set_yticks([])
    look = {"color": colour("soft"), "fontsize": FONT - 1}
    canvas.write(left, canvas.height - 9, "← slower than plain", **look)
    canvas.write(canvas.width - right, canvas.height - 9, "faster →", ha="right", **look)


def _one(axes: Axes, result: Result, span: tuple[float, float]) -> None:
    """The place of 1 in one row, and how far two equal runs differ."""
    low, high = (result.noise.low, result.noise.high) if result.noise is not None else (math.nan, math.nan)
    if words.known(low) and words.known(high):
        axes.fill_between((low, high), *span, color=colour("band"), linewidth=0)
    axes.plot((1.0, 1.0), span, color=colour("soft"), linewidth=1)


def _interval(axes: Axes, row: Row, y: float) -> None:
    trial = row.trial
    look = colour(row.mark if row.mark != "no" or trial.outcome == "slower" else "even")
    if ends(trial):
        axes.plot((trial.ratio_low, trial.ratio_high), (y, y), color=look, linewidth=2, solid_capstyle="round")  # type: ignore[arg-type]
    marker, fill = {"yes": ("o", look), "even": ("o", colour("paper")), "no": ("s", look), "never": ("X", look)}[
        row.mark
    ]
    size = 9 if marker == "X" else 7
    axes.plot((trial.ratio,), (y,), marker, color=look, markerfacecolor=fill, markersize=size, markeredgewidth=1.6)  # type: ignore[arg-type]


def _names(canvas: Canvas, row: Row, y: float) -> None:
    indent = (10 if canvas.narrow else 12) * min(row.depth, 6)
    numbers = f"{words.ratio(row.trial.ratio)} {ends(row.trial)}".rstrip()
    room = (canvas.width - LETTER * (len(numbers) + 1) if canvas.narrow else 232) - indent
    weight = "bold" if row.chosen else "normal"
    canvas.write(2 + indent, y, cut(row.words, int(room / LETTER)), weight=weight)
    canvas.write(canvas.width - 2, y, numbers, ha="right", weight=weight, fontsize=FONT - 1)
