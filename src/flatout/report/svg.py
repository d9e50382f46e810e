"""How does the data of a figure become SVG? Bars, intervals and plots, drawn for a wide page and for a narrow one.

In: a `Drawing`. Out: SVG to be put into HTML. Text stays text; colours are the page's custom properties, so that they
follow light and dark; text is escaped here, and whether it fits is judged by the width of a letter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup, escape
from rich.cells import cell_len, set_cell_size

from flatout.report.drawing import Bars, Drawing, Intervals, Line, Plot
from flatout.report.ticks import between
from flatout.report.words import printable, seconds

WIDE, NARROW = 720, 340
"""Width of the drawings, in CSS pixels where they are shown at their own size."""

LETTER = 7.6
"""Pixels that a letter takes at most, for deciding where text fits."""

SMALL = 6.8
"""The same of small text."""

BAR, STEP = 34, 70
"""Height of a bar, and from one to the next."""

SHAPES = {
    "dot": '<circle cx="{x}" cy="{y}" r="3.5" style="fill:{c};stroke:{c}"/>',
    "ring": '<circle cx="{x}" cy="{y}" r="3.5" style="fill:var(--paper);stroke:{c};stroke-width:1.6"/>',
    "square": '<path d="M{x} {y}m-3.5 -3.5h7v7h-7z" style="fill:{c};stroke:{c}"/>',
    "cross": '<path d="M{x} {y}m-4 -4l8 8m0 -8l-8 8" style="fill:none;stroke:{c};stroke-width:2.4"/>',
}

Scale = Callable[[float], float]
"""From a place of an axis to pixels."""


def drawn(found: Drawing) -> Markup:
    """A drawing for a wide page and for a narrow one; the style sheet shows one of them."""
    return Markup("").join(_sheet(found, width) for width in (WIDE, NARROW))


def cut(text: str, letters: int) -> str:
    """Text in at most so many letters; one of Chinese or Japanese counts as two."""
    text = printable(text)
    return text if cell_len(text) <= letters else set_cell_size(text, max(letters - 1, 1)).rstrip() + "…"


def _sheet(found: Drawing, width: int) -> Markup:
    narrow = width == NARROW
    parts: list[str] = []
    if isinstance(found, Bars):
        height = _bars(parts, found, width)
    elif isinstance(found, Intervals):
        height = _intervals(parts, found, width)
    else:
        height = _plot(parts, found, width)
    head = Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}" stroke-linejoin="round">').format(
        "narrow" if narrow else "wide", width, height, printable(found.label)
    )
    return head + Markup("".join(parts) + "</svg>")  # every text in the parts was escaped by `_text`


# -- the parts of a drawing --------------------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, *, ink: str = "ink", at: str = "start", look: str = "") -> str:
    """Text at a place; `look` is made of `bold`, `small` and `halo`, which sets it off from lines behind it."""
    style = f"fill:var(--{ink});font-size:{12 if 'small' in look else 13}px"
    style += ";font-weight:700" if "bold" in look else ""
    style += ";paint-order:stroke;stroke:var(--paper);stroke-width:3" if "halo" in look else ""
    place = f'x="{_n(x)}" y="{_n(y + 4.5)}"' + (f' text-anchor="{at}"' if at != "start" else "")
    return f'<text {place} style="{style}">{escape(printable(text))}</text>'


def _line(points: Sequence[tuple[float, float]], ink: str, width: float, more: str = "") -> str:
    path = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    return f'<path d="M{path}" style="fill:none;stroke:var(--{ink});stroke-width:{width}{more}"/>'


def _box(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" style="{style}"/>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _scale(axis: tuple[float, float], pixels: tuple[float, float], *, log: bool = False) -> Scale:
    low, high = (math.log(end) for end in axis) if log else axis
    first, last = pixels
    per = (last - first) / ((high - low) or 1.0)
    return lambda value: first + per * ((math.log(value) if log else value) - low)


def _below(parts: list[str], ticks: Sequence[tuple[float, str]], x: Scale, y: float, ends: tuple[float, float]) -> None:
    """An axis with its labels, which stay within the drawing."""
    parts.append(_line([(ends[0], y), (ends[1], y)], "line", 0.8))
    for place, text in ticks:
        at, half = x(place), SMALL * len(text) / 2
        anchor = "start" if at - half < 0 else "end" if at + half > ends[1] + 14 else "middle"
        parts.append(_text(at, y + 13, text, ink="soft", at=anchor, look="small"))


# -- bars --------------------------------------------------------------------------------------------------------------


def _bars(parts: list[str], found: Bars, width: int) -> int:
    longest = max(bar.length for bar in found.bars)
    x = _scale((0.0, longest), (1.0, width - 14.0))
    height = STEP * len(found.bars) + 40
    for number, bar in enumerate(found.bars):
        top, left = STEP * number + 25, 0.0
        parts.append(_text(1, top - 13, bar.name, look="bold"))
        parts.append(_text(1 + LETTER * (len(bar.name) + 2), top - 13, bar.total, ink="soft"))
        for name, colour, value in bar.parts:
            if not 0 < value < math.inf:
                continue
            wide = x(left + value) - x(left)
            fill = f"fill:var(--{colour});stroke:var(--paper);stroke-width:1.5"
            parts.append(_box(x(left), top, wide, BAR, fill))
            if LETTER * (len(name) + 1) <= wide:
                parts.append(_text(x(left + value / 2), top + BAR / 2, name, ink="on-phase", at="middle"))
            left += value
        parts.append(_box(x(0.0), top, x(left) - x(0.0), BAR, "fill:none;stroke:var(--soft);stroke-width:0.8"))
    places = between(0.0, longest, 4 if width == NARROW else 7)
    _below(parts, [(place, seconds(place)) for place in places], x, height - 38, (1.0, width - 14.0))
    return height


# -- intervals ---------------------------------------------------------------------------------------------------------


def _intervals(parts: list[str], found: Intervals, width: int) -> int:
    narrow, log = width == NARROW, found.zero > 0
    each, left, right = (46, 16, 16) if narrow else (28, 236, 134)
    height = each * len(found.lines) + 58
    low, high = _range(found)
    x = _scale((low, high), (left, width - right), log=log)
    for number, line in enumerate(found.lines):
        top = 10 + each * number
        middle, span = (top + 31, (top + 21, top + 41)) if narrow else (top + 14, (top, top + each))
        if found.band is not None:
            begin, end = (x(min(max(edge, low), high)) for edge in found.band)
            parts.append(_box(begin, span[0], end - begin, span[1] - span[0], "fill:var(--band)"))
        parts.append(_line([(x(found.zero), edge) for edge in span], "soft", 1))
        if math.isfinite(line.low) and math.isfinite(line.high):
            ends = [(x(line.low), middle), (x(line.high), middle)]
            parts.append(_line(ends, line.colour, 2, ";stroke-linecap:round"))
        parts.append(SHAPES[line.shape].format(x=_n(x(line.value)), y=_n(middle), c=f"var(--{line.colour})"))
        _names(parts, line, top + (11 if narrow else 14), width)
    _below(parts, found.ticks(low, high, 5 if narrow else 6), x, height - 48, (left, width - right))
    parts.append(_text(left, height - 9, found.ends[0], ink="soft", look="small"))
    parts.append(_text(width - right, height - 9, found.ends[1], ink="soft", at="end", look="small"))
    return height


def _range(found: Intervals) -> tuple[float, float]:
    ends = [end for line in found.lines for end in (line.low, line.value, line.high) if math.isfinite(end)]
    if found.zero > 0:
        return min(0.9, *ends) / 1.06, max(1.12, *ends) * 1.06
    reach = 1.1 * max(abs(end) for end in (*ends, *(found.band or ())))
    return -reach, reach


def _names(parts: list[str], line: Line, y: float, width: int) -> None:
    narrow = width == NARROW
    indent, bold = (10 if narrow else 12) * min(line.depth, 6), "bold" if line.bold else ""
    room = (width - LETTER * (len(line.said) + 1) if narrow else 232) - indent
    parts.append(_text(2 + indent, y, cut(line.name, int(room / LETTER)), look=bold))
    parts.append(_text(width - 2, y, line.said, at="end", look=f"{bold} small"))


# -- plots -------------------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


def _plot(parts: list[str], found: Plot, width: int) -> int:
    narrow = width == NARROW
    height = found.heights[1 if narrow else 0]
    foot = 54 if found.x.name else 40
    frame = (float(found.left), 10.0, width - 14.0, float(height - foot))
    x = _scale((found.x.low, found.x.high), (frame[0], frame[2]), log=found.x.log)
    y = _scale((found.y.low, found.y.high), (frame[3], frame[1]), log=found.y.log)
    for place, text in found.y.ticks(5):
        parts.append(_line([(frame[0], y(place)), (frame[2], y(place))], "line", 0.7))
        parts.append(_text(frame[0] - 6, y(place), text, ink="soft", at="end", look="small"))
    _below(parts, found.x.ticks(4 if narrow else 8), x, frame[3], (frame[0], frame[2]))
    if found.x.name:
        parts.append(_text(frame[2], height - 12, found.x.name, ink="soft", at="end", look="small"))
    for path in found.paths:
        dashes = ";stroke-dasharray:4 3" if path.dashed else ""
        parts.append(_line([(x(a), y(b)) for a, b in path.points], path.colour, 1.3, dashes))
    for dots in found.dots:  # those of one look as one path of round caps, a tenth of the size of circles
        caps = "".join(f"M{_n(x(a))} {_n(y(b))}h0" for a, b in dots.points)
        looks = ((dots.size + 3, dots.colour), (dots.size, "paper")) if dots.hollow else ((dots.size, dots.colour),)
        parts += [
            f'<path d="{caps}" style="fill:none;stroke-linecap:round;stroke:var(--{ink});stroke-width:{_n(size)}"/>'
            for size, ink in looks
        ]
    _notes(parts, found, (x, y), frame, narrow=narrow)
    return height


def _notes(parts: list[str], found: Plot, scales: tuple[Scale, Scale], frame: Box, *, narrow: bool) -> None:
    """Texts, each where it covers no dot and no other text; what finds no such place is left out."""
    x, y = scales
    taken = [(x(a) - 6, y(b) - 6, x(a) + 6, y(b) + 6) for dots in found.dots for a, b in dots.points]
    for note in found.notes:
        if narrow and note.wide:
            continue
        text, at = cut(note.text, 24 if note.side == "dot" else 40), (x(note.x), y(note.y))
        length = SMALL * len(text)
        for dx, dy, anchor in _PLACES[note.side]:
            left = at[0] + dx - {"start": 0.0, "middle": length / 2, "end": length}[anchor]
            box = (left, at[1] + dy - 7, left + length, at[1] + dy + 7)
            if note.side != "dot" or _free(box, taken, frame):
                taken.append(box)
                ink = "ink" if note.side == "dot" else "soft"
                parts.append(_text(at[0] + dx, at[1] + dy, text, ink=ink, at=anchor, look="small halo"))
                break


def _free(box: Box, taken: Sequence[Box], frame: Box) -> bool:
    inside = box[0] > frame[0] and box[2] < frame[2] + 10 and box[1] > frame[1] and box[3] < frame[3]
    return inside and not any(box[0] < r and box[2] > l and box[1] < b and box[3] > t for l, t, r, b in taken)  # noqa: E741


_BESIDE = ((12, 0, "start"), (-12, 0, "end"), (0, -18, "middle"), (0, 18, "middle"))
_PLACES = {
    "dot": (*_BESIDE, *((dx, dy, at) for dy in (-16, 16, -30, 30) for dx, at in ((10, "start"), (-10, "end")))),
    "slope": ((12, 8, "start"),),
    "roof": ((-2, -9, "end"),),
}
"""Where text may stand beside its place, in pixels, best first."""
