"""What do the page's figures look like? Where a step goes, the steps in time, what was tried, the roofline.

In: a `Result`. Out: SVG for the page, or None where there is nothing to draw. Each figure says the same in words
(`aria-label`); its caption and its numbers as a table are beside it in the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from flatout import ceilings as roofline_of
from flatout.anatomy import Anatomy
from flatout.report import words
from flatout.report.svg import FONT, Canvas, both, colour
from flatout.report.thinned import Dot, Kind, dots, thin
from flatout.report.tried import Row, rows
from flatout.result import Result
from flatout.trace import PHASES, Operation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 40
"""Trials in the figure; the table below it has all."""

MOST_NAMED = 7
"""Operations with their names in the roofline."""

LETTER = 7.6
"""Units that a letter of the drawing's text takes at most, for deciding where text fits."""


def cut(text: str, letters: int) -> str:
    """Text in at most so many letters."""
    text = words.printable(text)
    return text if len(text) <= letters else text[: max(letters - 1, 1)].rstrip() + "…"


# -- where a step goes ---------------------------------------------------------------------------------------------


def phase_colour(name: str) -> str:
    """The custom property that colours a phase; unknown phases share one."""
    return name if name in PHASES and name not in ("evaluation", "checkpoint") else "other"


def step(result: Result) -> Markup | None:
    """The plain step, and the winner's below it on the same scale, as stacked bars."""
    bars = [("before", result.anatomy)]
    if result.tuned_anatomy is not None and result.plan is not None:
        bars.append(("with the plan", result.tuned_anatomy))
    if not (words.known(result.anatomy.step_s) and result.anatomy.step_s > 0):
        return None
    label = ". ".join(f"{name.capitalize()}: {_step_words(anatomy)}" for name, anatomy in bars)
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
        canvas.write(1 + LETTER * (len(name) + 2), top + 12, f"{words.seconds(anatomy.step_s)} a step", color=colour("soft"))
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
    _ticks(axes.xaxis, _even_ticks(longest_s, 4 if canvas.narrow else 7), words.seconds)
    axes.set_yticks([])


# -- the steps in time ---------------------------------------------------------------------------------------------


def timeline(result: Result) -> Markup | None:
    """Every measured step as a dot; thinned, but with all outliers."""
    found = dots(result)
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
            _dots(axes, [d for d in shown if d.kind == kind and d.outside == outside], kind, hollow=outside)  # type: ignore[arg-type]
    lowest, highest = min(d.step_s for d in found), max(d.step_s for d in found)
    if highest > 4 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.25, highest * 1.25)
        _ticks(axes.yaxis, _log_ticks(lowest / 1.25, highest * 1.25), words.seconds)
    else:
        axes.set_ylim(0, highest * 1.08)
        _ticks(axes.yaxis, _even_ticks(highest * 1.08, 5), words.seconds)
    first, last = min(d.start_s for d in found), max(d.start_s for d in found)
    margin = 0.015 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    _ticks(axes.xaxis, [t for t in _even_ticks(last, 4 if canvas.narrow else 8) if t >= first - margin], words.duration)
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
        f"{row.trial.label} {words.times(row.trial.ratio)} {words.interval(row.trial.ratio_low, row.trial.ratio_high)}, "
        f"{row.trial.outcome}"
        for row in shown
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
    if result.noise is not None and words.known(result.noise.low) and words.known(result.noise.high):
        axes.axvspan(result.noise.low, result.noise.high, color=colour("band"), linewidth=0)
    axes.axvline(1.0, color=colour("soft"), linewidth=1)
    for number, row in enumerate(shown):
        y = each * number + (31 if canvas.narrow else 14)
        _interval(axes, row, y)
        _names(canvas, row, 10 + each * number + (11 if canvas.narrow else 14))
    _ticks(axes.xaxis, _ratio_ticks(low, high, 5 if canvas.narrow else 8), words.times)
    axes.set_yticks([])
    canvas.write(left, canvas.height - 9, "← slower than plain", color=colour("soft"), fontsize=FONT - 1)
    canvas.write(canvas.width - right, canvas.height - 9, "faster →", color=colour("soft"), fontsize=FONT - 1, ha="right")


def _interval(axes: Axes, row: Row, y: float) -> None:
    trial = row.trial
    look = colour(row.mark if row.mark != "no" or trial.outcome == "slower" else "even")
    axes.plot((trial.ratio_low, trial.ratio_high), (y, y), color=look, linewidth=2, solid_capstyle="round")  # type: ignore[arg-type]
    marker, fill = {"yes": ("o", look), "even": ("o", colour("paper")), "no": ("s", look), "never": ("X", look)}[row.mark]
    size = 9 if marker == "X" else 7
    axes.plot((trial.ratio,), (y,), marker, color=look, markerfacecolor=fill, markersize=size, markeredgewidth=1.6)  # type: ignore[arg-type]


def _names(canvas: Canvas, row: Row, y: float) -> None:
    indent = (10 if canvas.narrow else 12) * min(row.depth, 6)
    numbers = f"{words.ratio(row.trial.ratio)} {words.interval(row.trial.ratio_low, row.trial.ratio_high)}"
    room = (canvas.width - LETTER * (len(numbers) + 1) if canvas.narrow else 232) - indent
    weight = "bold" if row.chosen else "normal"
    canvas.write(2 + indent, y, cut(row.words, int(room / LETTER)), weight=weight)
    canvas.write(canvas.width - 2, y, numbers, ha="right", weight=weight, fontsize=FONT - 1)


# -- the roofline --------------------------------------------------------------------------------------------------


def roofline(result: Result) -> Markup | None:
    """The script's heaviest operations under the machine's measured ceilings."""
    found, census = result.ceilings, result.census
    bandwidth = found.get("memory_copy") if found else None
    peaks = [(d, c.value) for d in ("float32", "tf32", "bfloat16") if found and (c := found.get(f"matmul_{d}"))]
    placed = [op for op in (census.operations if census else ()) if op.flops > 0 and op.moved_bytes > 0 and op.self_s > 0]
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
        ys = [roofline_of.attainable_flops_per_s(x, peak_flops_per_s=peak, bandwidth_bytes_per_s=bandwidth) for x in xs]
        axes.plot(xs, ys, color=colour("soft"), linewidth=1.4)
        _say(axes, (high, peak), f"{name} {words.limit(peak, 'FLOP/s')}", (-2, 8), ha="right")
    slope_x = max(low * 1.15, floor / bandwidth * 3)
    _say(axes, (slope_x, slope_x * bandwidth), f"memory {words.limit(bandwidth, 'B/s')}", (-2, 14), ha="left")
    _operations(axes, placed, at, 4 if canvas.narrow else MOST_NAMED)
    count = 4 if canvas.narrow else 7
    _ticks(axes.xaxis, _decades(low, high, count), lambda x: f"{x:,g}")
    _ticks(axes.yaxis, _decades(floor, roof, count), lambda y: words.scaled(y, "FLOP/s"))
    axes.grid(color=colour("line"), linewidth=0.6)
    axes.set_axisbelow(True)
    canvas.write(canvas.width - 14, canvas.height - 12, "FLOP per byte moved", ha="right", color=colour("soft"), fontsize=FONT - 1)


def _operations(axes: Axes, placed: Sequence[Operation], at: Sequence[tuple[float, float]], most: int) -> None:
    total_s = math.fsum(op.self_s for op in placed)
    order = sorted(range(len(placed)), key=lambda number: -placed[number].self_s)
    for number in order:
        size = 5 + 16 * math.sqrt(placed[number].self_s / total_s)
        look = {"markersize": size, "color": colour("yes"), "markeredgecolor": colour("paper"), "alpha": 0.85}
        axes.plot(*at[number], "o", **look)
    taken: list[tuple[float, float, float, float]] = []
    for number in order[:most]:
        text = cut(placed[number].name, 24)
        place = _free_place(axes, at[number], LETTER * len(text), taken)
        if place is not None:
            _say(axes, at[number], text, place, ha="left", ink="ink")


def _free_place(
    axes: Axes, point: tuple[float, float], length: float, taken: list[tuple[float, float, float, float]]
) -> tuple[float, float] | None:
    """Where beside a point text fits without covering other text, in units from the point; None where nowhere."""
    x, y = axes.transData.transform(point)
    box = axes.bbox
    for dx, dy in ((12, 0), (-12 - length, 0), (-length / 2, 16), (-length / 2, -17), (10, 15), (10, -15), (10, -30)):
        left, low, right, high = x + dx, y + dy - 8, x + dx + length, y + dy + 8
        inside = left > box.x0 and right < box.x1 + 10 and low > box.y0 and high < box.y1
        if inside and not any(left < r and right > l and low < h and high > b for l, b, r, h in taken):  # noqa: E741
            taken.append((left, low, right, high))
            return dx, dy
    return None


def _say(axes: Axes, point: tuple[float, float], text: str, offset: tuple[float, float], *, ha: str, ink: str = "soft") -> None:
    axes.annotate(
        words.printable(text), point, xytext=offset, textcoords="offset points", ha=ha, va="center",
        color=colour(ink), fontsize=FONT - 1, parse_math=False, annotation_clip=False,
    )  # fmt: skip


# -- ticks ---------------------------------------------------------------------------------------------------------


def _ticks(axis: Any, places: Sequence[float], say: Any) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_major_formatter(FixedFormatter([say(place) for place in places]))
    axis.set_minor_locator(NullLocator())


def _even_ticks(last: float, most: int) -> list[float]:
    """Round numbers from 0 to at most `last`."""
    size = 10.0 ** math.floor(math.log10(last / most))
    stride = next(size * k for k in (1, 2, 5, 10, 20) if last / (size * k) <= most)
    return [number * stride for number in range(int(last / stride) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade; only whole decades where that would be many."""
    found = [
        k * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for k in (1, 2, 5)
        if low <= k * 10.0**e <= high
    ]
    decades = [x for x in found if f"{x:e}".startswith("1.0")]
    return decades if len(found) > 8 and len(decades) > 1 else found


def _ratio_ticks(low: float, high: float, most: int) -> list[float]:
    """Round ratios between two others; 1 is always among them."""
    for steps in ((0.9, 0.95, 1.0, 1.05, 1.1, 1.2), (0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6), (0.5, 0.7, 1.0, 1.5, 2, 3, 4)):
        if low >= steps[0] * 0.8 and high <= steps[-1] * 1.1:
            found = [x for x in steps if low <= x <= high]
            return found if len(found) <= most else [x for x in found if x in (0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.6, 2, 3)]
    found = [x for x in (0.01, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0) if low <= x <= high]
    return found if len(found) <= most else [x for x in found if x in (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)]


def _decades(low: float, high: float, most: int) -> list[float]:
    exponents = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    stride = max(math.ceil(len(exponents) / most), 1)
    return [10.0**e for e in exponents[::stride]]
