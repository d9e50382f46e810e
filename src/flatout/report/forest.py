"""What does a figure of ratios with their intervals look like? A forest plot around 1, on a logarithmic axis.

In: a `Line` for each ratio. Out: SVG for the page, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from flatout.report import ticks, words
from flatout.report.svg import FONT, LETTER, Canvas, both, colour, cut
from flatout.report.tried import Mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One ratio.

    Attributes:
        name: Of what, as it is drawn.
        whole_name: The same, in full.
        ratio: Above 1 is faster.
        low: Lower end of its interval.
        high: Upper end.
        ends: Both as text; empty where there are too few pairs for an interval.
        outcome: Its verdict in one word.
        mark: The verdict's mark.
        chosen: Whether the plan consists of it.
        depth: How far it is indented.
    """

    name: str
    whole_name: str
    ratio: float
    low: float
    high: float
    ends: str
    outcome: str
    mark: Mark
    chosen: bool = False
    depth: int = 0

    @property
    def is_drawable(self) -> bool:
        """Whether its numbers have a place on a logarithmic axis."""
        return all(words.known(x) and x > 0 for x in (self.ratio, self.low, self.high))


def forest(
    name: str, lines: Sequence[Line], *, beside: str = "plain", band: tuple[float, float] | None = None
) -> Markup | None:
    """The figure.

    Args:
        name: Unique in the page.
        lines: From top to bottom; what cannot be drawn is left out.
        beside: What 1 stands for.
        band: By what two equal runs differ.
    """
    shown = [line for line in lines if line.is_drawable]
    if not shown:
        return None
    label = "; ".join(
        f"{line.whole_name} {words.times(line.ratio)} {line.ends}".rstrip() + f", {line.outcome}" for line in shown
    )
    heights = (28 * len(shown) + 58, 46 * len(shown) + 58)
    return both(name, label, heights, lambda canvas: _draw(canvas, shown, beside, band))


def _draw(canvas: Canvas, shown: Sequence[Line], beside: str, band: tuple[float, float] | None) -> None:
    left, right = (16, 16) if canvas.narrow else (236, 134)
    axes = canvas.axes(left, 10, right, 48)
    each = 46 if canvas.narrow else 28
    low = min([0.9, *(line.low for line in shown)]) / 1.06
    high = max([1.12, *(line.high for line in shown)]) * 1.06
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(each * len(shown), 0)
    for number, line in enumerate(shown):
        y = each * number + (31 if canvas.narrow else 14)
        _one(axes, band, (y - 10, y + 10) if canvas.narrow else (each * number, each * (number + 1)))
        _interval(axes, line, y)
        _names(canvas, line, 10 + each * number + (11 if canvas.narrow else 14))
    ticks.place(axes.xaxis, ticks.ratios(low, high, 5 if canvas.narrow else 8), lambda x: f"{x:,g}x")
    axes.set_yticks([])
    look = {"color": colour("soft"), "fontsize": FONT - 1}
    canvas.write(left, canvas.height - 9, f"← slower than {beside}", **look)
    canvas.write(canvas.width - right, canvas.height - 9, "faster →", ha="right", **look)


def _one(axes: Axes, band: tuple[float, float] | None, span: tuple[float, float]) -> None:
    """The place of 1 in one row, and how far two equal runs differ."""
    if band is not None and all(map(words.known, band)):
        axes.fill_between(band, *span, color=colour("band"), linewidth=0)
    axes.plot((1.0, 1.0), span, color=colour("soft"), linewidth=1)


def _interval(axes: Axes, line: Line, y: float) -> None:
    look = colour(line.mark if line.mark != "no" or line.outcome == "slower" else "even")
    if line.ends:
        axes.plot((line.low, line.high), (y, y), color=look, linewidth=2, solid_capstyle="round")
    marker, fill = {"yes": ("o", look), "even": ("o", colour("paper")), "no": ("s", look), "never": ("X", look)}[
        line.mark
    ]
    size = 9 if marker == "X" else 7
    axes.plot((line.ratio,), (y,), marker, color=look, markerfacecolor=fill, markersize=size, markeredgewidth=1.6)


def _names(canvas: Canvas, line: Line, y: float) -> None:
    indent = (10 if canvas.narrow else 12) * min(line.depth, 6)
    numbers = f"{words.ratio(line.ratio)} {line.ends}".rstrip()
    room = (canvas.width - LETTER * (len(numbers) + 1) if canvas.narrow else 232) - indent
    weight = "bold" if line.chosen else "normal"
    canvas.write(2 + indent, y, cut(line.name, int(room / LETTER)), weight=weight)
    canvas.write(canvas.width - 2, y, numbers, ha="right", weight=weight, fontsize=FONT - 1)
