"""What is in a figure? Its data: bars, intervals, or lines and dots between two axes.

In: what a kind of result has to draw. Out: a `Drawing`, which `svg.py` draws. Places are in the unit of what is
drawn; colours are names of the page's custom properties. Each drawing has a `name`, unique in the page, and a `label`:
what is to be seen, for those who do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Ticks = Sequence[tuple[float, str]]
"""Places of an axis, and what is written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing cut into parts: its length in words; name, colour and length of each part, from the left."""

    name: str
    total: str
    parts: tuple[tuple[str, str, float], ...]

    @property
    def length(self) -> float:
        """Of all its parts that can be drawn."""
        return sum(value for _, _, value in self.parts if 0 < value < float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Bars of seconds below each other on one scale."""

    name: str
    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One value with its interval, whose ends are NaN without one; `said` are the numbers as text."""

    name: str
    value: float
    low: float = float("nan")
    high: float = float("nan")
    said: str = ""
    colour: str = "plan"
    shape: Literal["dot", "ring", "square", "cross"] = "dot"
    bold: bool = False
    depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Values with their intervals below each other, around what says nothing.

    Attributes:
        name: Unique in the page.
        label: What is to be seen.
        lines: From top to bottom.
        zero: The value that says nothing: 1 of ratios, whose axis is logarithmic, or 0.
        band: What two equal runs differ by, or what is allowed; None without.
        ends: What is said at the left and the right of the axis.
        ticks: From both ends of the axis and the number of labels that it has room for.
    """

    name: str
    label: str
    lines: tuple[Line, ...]
    zero: float
    band: tuple[float, float] | None
    ends: tuple[str, str]
    ticks: Callable[[float, float, int], Ticks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a plot; `ticks` takes the number of labels that it has room for."""

    low: float
    high: float
    ticks: Callable[[int], Ticks]
    log: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A line of a plot, from one end to the other."""

    points: tuple[tuple[float, float], ...]
    colour: str = "soft"
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """Dots of one look, `size` pixels wide; hollow ones are rings."""

    points: tuple[tuple[float, float], ...]
    colour: str
    size: float = 4.0
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A text beside a dot, where there is room, or above a line; `wide` is one that a narrow drawing leaves out."""

    x: float
    y: float
    text: str
    side: Literal["dot", "slope", "roof"] = "dot"
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines and dots between two axes.

    Attributes:
        name: Unique in the page.
        label: What is to be seen.
        x: The axis below.
        y: The axis at the left.
        heights: In pixels, of a wide and a narrow drawing.
        left: Room for the labels of `y`, in pixels.
        paths: Lines.
        dots: Dots, drawn above the lines.
        notes: Texts, the weightiest first; one without room is left out.
    """

    name: str
    label: str
    x: Axis
    y: Axis
    heights: tuple[int, int] = (300, 270)
    left: int = 58
    paths: tuple[Path, ...] = ()
    dots: tuple[Dots, ...] = ()
    notes: tuple[Note, ...] = ()


Drawing = Bars | Intervals | Plot
