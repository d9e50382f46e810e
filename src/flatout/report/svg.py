"""How does a drawing get into the page? matplotlib draws, this makes the SVG small, readable and at home there.

In: a function that draws on a matplotlib figure. Out: SVG to be put into HTML, drawn for a wide page and again for a
narrow one. Text stays text; colours become the page's custom properties, so that they follow light and dark; ids are
unique in the page. matplotlib is imported with the first drawing, and its global settings are left alone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup
from rich.cells import cell_len, set_cell_size

from flatout.report.words import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 720
NARROW = 340
"""Units of the drawings' width, CSS pixels where they are shown at their own size."""

FONT = 13
"""Size of text in the same units."""

LETTER = 7.6
"""Units that a letter of the drawing's text takes at most, for deciding where text fits."""

#: Colours as matplotlib is given them, and what they become. The page's style sheet says what each looks like.
_TOKENS = (
    *(
        "ink",
        "soft",
        "line",
        "paper",
        "on-phase",
        "yes",
        "no",
        "never",
        "even",
        "band",
        "plain",
        "try",
        "plan",
        "aside",
    ),
    *(
        "data",
        "copy",
        "forward",
        "loss",
        "backward",
        "optimizer",
        "communication",
        "sync",
        "garbage",
        "other",
        "unattributed",
    ),
)
_COLOURS = {f"#a1b2{number:02x}": f"var(--{name})" for number, name in enumerate(_TOKENS)}
_PLACEHOLDERS = {name: f"#a1b2{number:02x}" for number, name in enumerate(_TOKENS)}

_NUMBER = re.compile(r"-?\d+\.\d+")
_UPRIGHT = re.compile(r"^rotate\(-?0 ")
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flatout",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": FONT,
    "font.family": "DejaVu Sans",
    "path.simplify": False,
}


def cut(text: str, letters: int) -> str:
    """Text in at most so many letters; one of Chinese or Japanese counts as two."""
    text = printable(text)
    return text if cell_len(text) <= letters else set_cell_size(text, max(letters - 1, 1)).rstrip() + "…"


def colour(name: str) -> str:
    """The colour that stands for a custom property of the page while matplotlib draws.

    >>> colour("ink")
    '#a1b200'
    """
    return _PLACEHOLDERS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """What is drawn on.

    Attributes:
        figure: One unit is one CSS pixel.
        width: In units.
        height: In units.
        narrow: Whether this is for a telephone.
    """

    figure: Figure
    width: int
    height: int
    narrow: bool

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Axes with these margins in units; only a thin line below, no ticks."""
        box = (
            left / self.width,
            bottom / self.height,
            (self.width - left - right) / self.width,
            (self.height - top - bottom) / self.height,
        )
        found: Axes = self.figure.add_axes(box)
        found.set_facecolor("none")
        for side in ("left", "right", "top"):
            found.spines[side].set_visible(False)
        found.spines["bottom"].set_color(colour("line"))
        found.tick_params(which="both", length=0, labelcolor=colour("soft"), labelsize=FONT - 1)
        found.tick_params(which="minor", labelbottom=False, labelleft=False)
        return found

    def write(self, x: float, y: float, text: str, **style: object) -> None:
        """Text at a place in units from the top left; `**style` as matplotlib's `Figure.text` has it."""
        look = {"color": colour("ink"), "fontsize": FONT, "va": "center", **style}
        self.figure.text(x / self.width, 1 - y / self.height, printable(text), parse_math=False, **look)  # type: ignore[arg-type]


def both(name: str, label: str, heights: tuple[int, int], draw: Callable[[Canvas], None]) -> Markup:
    """A drawing for a wide page and for a narrow one; the style sheet shows one of them.

    Args:
        name: Unique in the page.
        label: What is to be seen, for those who do not see it.
        heights: In units, wide and narrow.
        draw: Draws on a `Canvas`.
    """
    wide = _drawn(f"{name}-wide", label, (WIDE, heights[0]), draw)
    narrow = _drawn(f"{name}-narrow", label, (NARROW, heights[1]), draw)
    return Markup(wide + narrow)  # every text and attribute in it was escaped by ElementTree


def _drawn(name: str, label: str, size: tuple[int, int], draw: Callable[[Canvas], None]) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    width, height = size
    raw = io.BytesIO()
    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs that our font lacks and the reader's has
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)  # so that a unit is a pixel everywhere
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        draw(Canvas(figure=figure, width=width, height=height, narrow=width == NARROW))
        figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(raw.getvalue())
    _clean(root, name)
    attributes = {
        "class": "narrow" if width == NARROW else "wide",
        "viewBox": f"0 0 {width} {height}",
        "role": "img",
        "aria-label": printable(label),
        "stroke-linejoin": "round",
    }
    root.attrib.clear()
    root.attrib.update(attributes)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(root: ElementTree.Element, name: str) -> None:
    """Take away what the page does not need, in place."""
    used = {value for element in root.iter() for value in _references(element)}
    root.tag = "svg"
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if element.tag != "text":
            element.text = None
        element.tail = None
        element.attrib = {
            key.replace(_LINK, "href"): changed
            for key, value in element.attrib.items()
            if (changed := _attribute(element.tag, key, value, name, used)) is not None
        }
    _flatten(root)


def _references(element: ElementTree.Element) -> list[str]:
    return [element.attrib.get(_LINK, "#")[1:], element.attrib.get("clip-path", "")[5:-1]]


def _attribute(tag: str, key: str, value: str, name: str, used: set[str]) -> str | None:
    """What becomes of an attribute; None where it goes."""
    if key == "id":
        return f"{name}-{value}" if value in used else None
    if key == _LINK:
        return f"#{name}-{value[1:]}"
    if key == "clip-path":
        return f"url(#{name}-{value[5:-1]})"
    if key == "transform" and _UPRIGHT.match(value):
        return None
    if key == "style":
        return _style(tag, value)
    if key in ("d", "x", "y", "width", "height", "transform"):
        return _NUMBER.sub(_rounded, value).replace("\n", "").replace(" L ", "L").replace("M ", "M").replace("L ", "L")
    return value


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found.group()):.1f}".removesuffix(".0")


def _style(tag: str, value: str) -> str:
    """A style without fonts, which are the page's, and with the page's colours."""
    kept = []
    for part in value.split(";"):
        key, _, setting = (word.strip() for word in part.partition(":"))
        if key == "font-family" or (key == "stroke-linejoin" and setting == "miter"):
            continue
        if key == "font":  # style, size and family in one, where any is unusual
            size = re.search(r"[\d.]+px", setting)
            kept.append("font-weight:700" if "700" in setting or "bold" in setting else "")
            kept.append(f"font-size:{size.group()}" if size else "")
            continue
        kept.append(f"{key}:{_COLOURS.get(setting, setting)}" if key else "")
    return ";".join(filter(None, kept))


def _flatten(parent: ElementTree.Element) -> None:
    """Replace groups that say nothing by what is in them."""
    children: list[ElementTree.Element] = []
    for child in list(parent):
        _flatten(child)
        children.extend(child if child.tag == "g" and not child.attrib else [child])
        parent.remove(child)
    parent.extend(children)
