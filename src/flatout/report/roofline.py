"""How far is each operation from the machine's limits? The roofline as a figure of the page.

In: a `Result` with a census and ceilings. Out: SVG, or None where either is missing.
Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from flatout.ceilings import attainable_flops_per_s
from flatout.report import ticks, words
from flatout.report.svg import FONT, Canvas, both, colour, cut
from flatout.result import Result
from flatout.trace import Operation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 7
"""Operations with their names in the figure."""

SMALL_LETTER = 6.8
"""Units that a letter takes here, where text is small."""

Box = tuple[float, float, float, float]
"""Left, low, right, high, in units."""


def roofline(result: Result) -> Markup | None:
    """The script's heaviest operations under the machine's measured ceilings."""
    found, census = result.ceilings, result.census
    bandwidth = found.get("memory_copy") if found else None
    peaks = [(dtype, peak.value) for dtype, peak in found.peaks().items()] if found else []
    placed = [
        op for op in (census.operations if census else ()) if op.flops > 0 and op.moved_bytes > 0 and op.self_s > 0
    ]
    if bandwidth is None or not peaks or not placed:
        return None
    top = max(placed, key=lambda op: op.self_s)
    label = (
        f"Ceilings: memory {words.limit(bandwidth.value, 'B/s')}, "
        + ", ".join(f"{name} {words.limit(value, 'FLOP/s')}" for name, value in peaks)
        + f". {words.plural(len(placed), 'operation')} below them; the heaviest, {top.name}, does "
        + f"{words.scaled(top.flops / top.self_s, 'FLOP/s')}"
    )
    limits = (bandwidth.value, peaks)
    return both("roofline", label, (380, 340), lambda canvas: _draw_roofline(canvas, limits, placed))


def _draw_roofline(
    canvas: Canvas, limits: tuple[float, Sequence[tuple[str, float]]], placed: Sequence[Operation]
) -> None:
    axes = canvas.axes(82, 14, 14, 54)
    bandwidth, peaks = limits
    at = [(op.flops / op.moved_bytes, op.flops / op.self_s) for op in placed]
    ridge = max(value for _, value in peaks) / bandwidth
    low, high = min(0.5, *(x for x, _ in at)) / 2, max(ridge * 4, *(x * 3 for x, _ in at), 1.0)
    floor, roof = min(y for _, y in at) / 4, max(*(v for _, v in peaks), *(y for _, y in at)) * 2.4
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(floor, roof)
    for name, peak in peaks:
        xs = [low, peak / bandwidth, high]
        ys = [attainable_flops_per_s(x, peak_flops_per_s=peak, bandwidth_bytes_per_s=bandwidth) for x in xs]
        axes.plot(xs, ys, color=colour("soft"), linewidth=1.4)
        limit = "" if canvas.narrow else f" {words.limit(peak, 'FLOP/s')}"
        _say(axes, (high, peak), f"{name}{limit}", (-2, 8), ha="right")
    slope_x = max(low, floor / bandwidth) * 1.25
    memory = f"memory {words.limit(bandwidth, 'B/s')}"
    _say(axes, (slope_x, slope_x * bandwidth), memory, (14, 0), ha="left")
    taken = _obstacles(axes, bandwidth, peaks, at)
    left, middle = axes.transData.transform((slope_x, slope_x * bandwidth))
    taken.append((left, middle - 8, left + 14 + SMALL_LETTER * len(memory), middle + 8))
    _operations(axes, placed, at, taken, 4 if canvas.narrow else MOST_NAMED)
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
