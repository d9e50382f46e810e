"""What is in a figure? Its data: bars, intervals, or lines and dots between two axes.

In: what a kind of result has to draw. Out: a `Drawing`, which `svg.py` draws. Places are in the unit of what is
drawn; colours are names of the page's custom properties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing cut into parts.

    Attributes:
        name: What it is.
        total: How long it is, in words.
        parts: Name, colour and length of each part, from the left.
    """

    name: str
    total: str
    parts: tuple[tuple[str, str, float], ...]

    @property
    def length(self) -> float:
        """Of all its parts that can be drawn."""
        return sum(value for _, _, value in self.parts if 0 < value < float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Bars below each other on one scale.

    Attributes:
        name: Unique in the page.
        label: What is to be seen, for those who do not see it.
        bars: From top to bottom.
    """

    name: str
    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One value with its interval.

    Attributes:
        name: Of what.
        value: The value.
        low: Lower end of its interval; NaN without one.
        high: Upper end.
        said: The numbers as text.
        colour: Of dot and interval.
        shape: `dot`, `ring`, `square` or `cross`.
        bold: Whether it is the one that counts.
        depth: How far it is indented.
    """

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
        ticks: Places of the axis and their labels, for a wide and for a narrow drawing.
    """

    name: str
    label: str
    lines: tuple[Line, ...]
    zero: float
    band: tuple[float, float] | None
    ends: tuple[str, str]
    ticks: Callable[[float, float, int], Sequence[tuple[float, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a plot.

    Attributes:
        low: Where it begins.
        high: Where it ends.
        ticks: Of how many labels which places have one, and what is written there.
        log: Whether it is logarithmic.
        name: What is written beside it.
    """

    low: float
    high: float
    ticks: Callable[[int], Sequence[tuple[float, str]]]
    log: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A line of a plot.

    Attributes:
        points: From one end to the other.
        colour: Its colour.
        dashed: Whether it is dashed.
    """

    points: tuple[tuple[float, float], ...]
    colour: str = "soft"
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """Dots of one look.

    Attributes:
        points: Where.
        colour: Their colour.
        size: Their diameter in pixels.
        hollow: Whether they are rings.
    """

    points: tuple[tuple[float, float], ...]
    colour: str
    size: float = 4.0
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A text in a plot.

    Attributes:
        x: Where.
        y: Where.
        text: What.
        side: Beside a dot, where there is room; or above a line, towards its right end.
        wide: Whether a narrow drawing leaves it out.
    """

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
