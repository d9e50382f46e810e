"""How far is each operation from the machine's limits? The roofline as a figure of the page.

In: a `Result` with a census and ceilings. Out: SVG, or None where either is missing.
Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from flatout.judge.result import Result
from flatout.judge.roofline import Standing, standing
from flatout.records.ceilings import attainable_flops_per_s
from flatout.records.trace import Operation
from flatout.report import ticks, words
from flatout.report.svg import FONT, Canvas, both, colour, cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 7
"""Operations with their names in the figure."""

SMALL_LETTER = 6.8
"""Units that a letter takes here, where text is small."""

Box = tuple[float, float, float, float]
"""Left, low, right, high, in units."""


def roofline(result: Result) -> Markup | None:
    """The script's heaviest operations under the machine's measured ceilings; None where no operation can be placed."""
    found, census = result.ceilings, result.census
    bandwidth = found.bandwidth() if found else None
    peaks = [(dtype, peak.value) for dtype, peak in found.peaks().items()] if found else []
    stands = [standing(op, found) for op in (census.operations if census else ())] if found else []
    placed = [s for s in stands if s is not None and s.operation.flops > 0 and s.operation.moved_bytes > 0]
    if found is None or bandwidth is None or not peaks or not placed:
        return None
    top = max((s.operation for s in placed), key=lambda op: op.self_s)
    above = [s.operation.name for s in placed if s.is_above()]
    cache = found.get("memory_cache")
    slopes = [(words.ceiling(bandwidth.name), bandwidth.value), *([("cache", cache.value)] if cache else [])]
    label = (
        "Ceilings: "
        + ", ".join(f"{name} {words.limit(value, 'B/s')}" for name, value in slopes)
        + ", "
        + ", ".join(f"{name} {words.limit(value, 'FLOP/s')}" for name, value in peaks)
        + f". {words.plural(len(placed) - len(above), 'operation')} below them; the heaviest, {top.name}, does "
        + f"{words.scaled(top.flops / top.self_s, 'FLOP/s')}"
        + (f". Above them by more than their spread: {', '.join(above)}" if above else "")
    )
    return both("roofline", label, (380, 340), lambda canvas: _draw_roofline(canvas, (slopes, peaks), placed))


Slopes = Sequence[tuple[str, float]]
"""What a line is called, and its limit."""


def _draw_roofline(canvas: Canvas, limits: tuple[Slopes, Slopes], placed: Sequence[Standing]) -> None:
    axes = canvas.axes(82, 14, 14, 54)
    slopes, peaks = limits
    bandwidth = slopes[0][1]
    at = [(s.operation.flops / s.operation.moved_bytes, s.operation.flops / s.operation.self_s) for s in placed]
    ridge = max(value for _, value in peaks) / bandwidth
    low, high = min(0.5, *(x for x, _ in at)) / 2, max(ridge * 4, *(x * 3 for x, _ in at), 1.0)
    floor, roof = min(y for _, y in at) / 4, max(*(v for _, v in peaks), *(y for _, y in at)) * 2.4
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(floor, roof)
    _lines(axes, limits, (low, high), narrow=canvas.narrow)
    taken = _obstacles(axes, bandwidth, peaks, at)
    for name, slope in slopes:
        x = max(low, floor / slope) * 1.25
        text = f"{name} {words.limit(slope, 'B/s')}"
        _say(axes, (x, x * slope), text, (14, 0), ha="left")
        left, middle = axes.transData.transform((x, x * slope))
        taken.append((left, middle - 8, left + 14 + SMALL_LETTER * len(text), middle + 8))
    _operations(axes, [s.operation for s in placed], at, taken, 4 if canvas.narrow else MOST_NAMED)
    count = 4 if canvas.narrow else 7
    ticks.place(axes.xaxis, ticks.decades(low, high, count), lambda x: f"{x:,g}")
    ticks.place(axes.yaxis, ticks.decades(floor, roof, count), lambda y: words.scaled(y, "FLOP/s"))
    axes.grid(color=colour("line"), linewidth=0.6)
    axes.set_axisbelow(True)
    canvas.write(
        canvas.width - 14,
        canvas.height - 12,
        "FLOP per byte moved",
        ha="right",
        color=colour("soft"),
        fontsize=FONT - 1,
    )


def _lines(axes: Axes, limits: tuple[Slopes, Slopes], ends: tuple[float, float], *, narrow: bool) -> None:
    """The roofs, and what the flat ones are called."""
    slopes, peaks = limits
    for name, peak in peaks:
        for _, slope in slopes:
            xs = [ends[0], peak / slope, ends[1]]
            ys = [attainable_flops_per_s(x, peak_flops_per_s=peak, bandwidth_bytes_per_s=slope) for x in xs]
            axes.plot(xs, ys, color=colour("soft"), linewidth=1.4)
        limit = "" if narrow else f" {words.limit(peak, 'FLOP/s')}"
        _say(axes, (ends[1], peak), f"{name}{limit}", (-2, 8), ha="right")


def _obstacles(
    axes: Axes, bandwidth: float, peaks: Sequence[tuple[str, float]], at: Sequence[tuple[float, float]]
) -> list[Box]:
    """Where dots and lines are, so that no text covers them."""
    found = [(x - 6, y - 6, x + 6, y + 6) for x, y in axes.transData.transform(at)]
    for _, peak in peaks:
        x, y = axes.transData.transform((peak / bandwidth, peak))
        found.append((x, y - 2, axes.bbox.x1, y + 16))
    x, y = axes.transData.transform((peaks[0][1] / bandwidth, peaks[0][1]))
    further, higher = axes.transData.transform((10 * peaks[0][1] / bandwidth, 10 * peaks[0][1]))
    for number in range(-200, 40):
        dx = 3 * number
        dy = dx * (higher - y) / (further - x)
        found.append((x + dx - 2, y + dy - 2, x + dx + 2, y + dy + 2))
    return found


def _operations(
    axes: Axes, placed: Sequence[Operation], at: Sequence[tuple[float, float]], taken: list[Box], most: int
) -> None:
    total_s = math.fsum(op.self_s for op in placed)
    order = sorted(range(len(placed)), key=lambda number: -placed[number].self_s)
    for number in order:
        size = 5 + 16 * math.sqrt(placed[number].self_s / total_s)
        look = {"markersize": size, "color": colour("yes"), "markeredgecolor": colour("paper"), "alpha": 0.85}
        axes.plot(*at[number], "o", **look)  # type: ignore[arg-type]
    for number in order[:most]:
        text = cut(placed[number].name, 24)
        where = _free_place(axes, at[number], SMALL_LETTER * len(text), taken)
        if where is not None:
            _say(axes, at[number], text, where[:2], ha=where[2], ink="ink")


def _free_place(
    axes: Axes, point: tuple[float, float], length: float, taken: list[Box]
) -> tuple[float, float, str] | None:
    """Where beside a point text covers nothing, in units from the point, and its alignment; None where nowhere."""
    x, y = axes.transData.transform(point)
    box = axes.bbox
    for dx, dy, ha in _PLACES:
        left = x + dx - {"left": 0.0, "center": length / 2, "right": length}[ha]
        low, right, high = y + dy - 7, left + length, y + dy + 7
        inside = left > box.x0 and right < box.x1 + 10 and low > box.y0 and high < box.y1
        if inside and not any(left < r and right > l and low < h and high > b for l, b, r, h in taken):  # noqa: E741
            taken.append((left, low, right, high))
            return dx, dy, ha
    return None


_PLACES = (
    *((12.0, 0.0, "left"), (-12.0, 0.0, "right"), (0.0, 18.0, "center"), (0.0, -18.0, "center")),
    *((10.0, 16.0, "left"), (10.0, -16.0, "left"), (-10.0, 16.0, "right"), (-10.0, -16.0, "right")),
    *((50.0, 18.0, "right"), (50.0, -18.0, "right")),
    *((10.0, 30.0, "left"), (10.0, -30.0, "left"), (-10.0, 30.0, "right"), (-10.0, -30.0, "right")),
)
"""Where text may stand beside its dot, best first."""


def _say(
    axes: Axes, point: tuple[float, float], text: str, offset: tuple[float, float], *, ha: str, ink: str = "soft"
) -> None:
    axes.annotate(
        words.printable(text), point, xytext=offset, textcoords="offset points", ha=ha, va="center",
        color=colour(ink), fontsize=FONT - 1, parse_math=False, annotation_clip=False,
    )  # fmt: skip
