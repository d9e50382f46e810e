"""What do the figures of a proof look like? Each seed's difference against the margin, and the metric on its way.

In: a `Proof`. Out: SVG for the page, or None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from markupsafe import Markup

from flatout.judge.equivalence import LARGEST
from flatout.judge.metric import Reading
from flatout.judge.proof import Proof, WholeRun
from flatout.report import proof_words, ticks, words
from flatout.report.svg import FONT, Canvas, both, colour

Item = TypeVar("Item")

MOST_SEEDS = 40
"""In the figure; the table below it has all."""

MOST_POINTS = 3000
"""Of all lines of a figure together; a line of a hundred points looks the same as one of a thousand."""

EACH = 26
"""Units of height of a row."""

LOGARITHMIC = 20.0
"""From so many times the smallest value on, the metric's axis is logarithmic."""


def differences(found: Proof) -> Markup | None:
    """Each seed's difference as a dot, their mean with its interval below; what lies within the margin is shaded."""
    shown = [(f"seed {seed}", b.value - a.value) for seed, a, b in found.by_seed() if _comparable(a, b)]  # type: ignore[union-attr,operator]
    judged = found.equivalence
    if not shown or not words.known(judged.difference):
        return None
    reach = max(
        [abs(x) for _, x in shown] + [abs(x) for x in (judged.margin, judged.low, judged.high) if words.known(x)]
    )
    if not reach > 0:
        return None
    label = "; ".join(f"{name} {proof_words.signed(value)}" for name, value in (*shown, ("mean", judged.difference)))
    rows = shown[:MOST_SEEDS]
    height = EACH * (len(rows) + 1) + 58
    return both("differences", label, (height, height), lambda canvas: _draw_differences(canvas, found, rows, reach))


def _comparable(plain: WholeRun | None, plan: WholeRun | None) -> bool:
    return all(r is not None and not r.problem and words.known(r.value) for r in (plain, plan))


def _draw_differences(canvas: Canvas, found: Proof, rows: Sequence[tuple[str, float]], reach: float) -> None:
    left, right = 76, 84
    axes = canvas.axes(left, 10, right, 48)
    axes.set_xlim(-1.1 * reach, 1.1 * reach)
    axes.set_ylim(EACH * (len(rows) + 1), 0)
    judged = found.equivalence
    if words.known(judged.margin) and judged.margin > 0:
        axes.axvspan(-judged.margin, judged.margin, color=colour("band"), linewidth=0)
    axes.axvline(0.0, color=colour("soft"), linewidth=1)
    for number, (name, value) in enumerate((*rows, ("mean", judged.difference))):
        y, mean = EACH * number + EACH / 2, number == len(rows)
        weight = "bold" if mean else "normal"
        if mean and words.known(judged.low):
            axes.plot((judged.low, judged.high), (y, y), color=colour("plan"), linewidth=2, solid_capstyle="round")
        axes.plot(
            (value,), (y,), "o", color=colour("plan"), markersize=7, markerfacecolor=colour("plan" if mean else "paper")
        )
        canvas.write(2, 10 + y, name, weight=weight)
        canvas.write(canvas.width - 2, 10 + y, proof_words.signed(value), ha="right", weight=weight)
    places = [-reach, 0.0, reach]
    ticks.place(axes.xaxis, places, lambda x: proof_words.signed(x))
    axes.set_yticks([])
    look = {"color": colour("soft"), "fontsize": FONT - 1}
    canvas.write(left, canvas.height - 9, "← lower than plain", **look)
    canvas.write(canvas.width - right, canvas.height - 9, "higher →", ha="right", **look)


def curves(found: Proof) -> Markup | None:
    """The metric on its way in each run; None where no run says when it had which."""
    lines = [(run, timed(run.readings)) for run in found.runs]
    lines = [(run, points) for run, points in lines if len(points) > 1]
    if not lines:
        return None
    longest_s = max(points[-1][0] for _, points in lines)
    low, high = (choose(value for _, points in lines for _, value in points) for choose in (min, max))
    label = (
        f"{found.asked.metric.name} of {words.plural(len(lines), 'run')} in {words.duration(longest_s)}, "
        f"between {proof_words.number(low)} and {proof_words.number(high)}"
    )
    return both("curves", label, (300, 270), lambda canvas: _draw_curves(canvas, found, lines))


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Every so many of them one, and the last: about `most` in all.

    >>> thinned([1, 2, 3, 4, 5, 6, 7, 8], 4)
    [1, 3, 5, 7, 8]
    """
    stride = max(math.ceil(len(items) / max(most, 1)), 1)
    found = list(items[::stride])
    return found if not items or (len(items) - 1) % stride == 0 else [*found, items[-1]]


def timed(readings: Sequence[Reading]) -> list[tuple[float, float]]:
    """Seconds and value of the readings that have both and can be drawn."""
    return [(r.at_s, r.value) for r in readings if r.at_s is not None and abs(r.value) < LARGEST]


def _draw_curves(canvas: Canvas, found: Proof, lines: Sequence[tuple[WholeRun, Sequence[tuple[float, float]]]]) -> None:
    axes = canvas.axes(58, 10, 12, 40)
    for run, points in lines:
        axes.plot(
            *zip(*thinned(points, MOST_POINTS // len(lines)), strict=True),
            color=colour(run.side),
            linewidth=1.2,
            solid_joinstyle="round",
        )
    values = [value for _, points in lines for _, value in points]
    values += [found.target] if found.target is not None else []
    low, high = min(values), max(values)
    if low > 0 and high > LOGARITHMIC * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.1, high * 1.1)
        ticks.place(axes.yaxis, ticks.logarithmic(low / 1.1, high * 1.1), proof_words.number)
    else:
        room = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
        axes.set_ylim(low - room, high + room)
        ticks.place(axes.yaxis, ticks.between(low - room, high + room, 5), proof_words.number)
    if found.target is not None:
        axes.axhline(found.target, color=colour("soft"), linewidth=1, linestyle=(0, (4, 3)))
    last_s = max(at_s for _, points in lines for at_s, _ in points)
    axes.set_xlim(0, 1.02 * last_s)
    ticks.place(axes.xaxis, ticks.clock_times(0.0, last_s, 4 if canvas.narrow else 8), ticks.clock)
    axes.grid(axis="y", color=colour("line"), linewidth=0.7)
    axes.set_axisbelow(True)
