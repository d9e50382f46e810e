"""How is a `View` shown on a terminal? Labelled paragraphs, lists and tables, one below the other; no figures.

In: a `View`. Out: a `Report`, which `flatout.report.screen.show` prints.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len

from flatout.report import words
from flatout.report.screen import LABEL, Report, Screen
from flatout.report.table import NOTHING, Look, Mark, Table, Tone
from flatout.report.view import Item, Listing, Row, View

BAR, NARROW_BAR = 22, 6
"""Columns of the longest bar."""

NAME, MOST_NAME = 22, 26
"""Columns of what was tried: at least, and at most on 80 columns."""

CELL_LINES = 3
"""Lines of the text at the end of a table's row, unless everything is asked for."""

LIST_LINES = 2
"""Lines of a list, unless everything is asked for."""

MARKS: dict[Mark, str] = {"yes": "✔", "even": "·", "no": "–", "never": "✖"}

_MARK_STYLES: dict[Mark, str] = {"yes": "green", "even": "yellow", "no": "dim", "never": "red"}
_STYLES: dict[Tone, str] = {"good": "green", "bad": "red", "unsure": "yellow", "quiet": "dim", "caution": "yellow"}


def report(view: View, *, verbose: bool = False) -> Report:
    """The view, whole where `verbose`, else on about one screen."""

    def compose(screen: Screen) -> None:
        if view.title:
            screen.say("", (view.title, "bold"), "".join(f" · {part}" for part in view.context if part), indent=0)
        for section in view.sections:
            _items(screen, section.on("screen"), verbose=verbose)
        screen.blank()
        _items(screen, [item for item in view.verdict if item.on != "page"], verbose=verbose)
        if view.page:
            screen.command("report", str(words.nearby(Path(view.page))))
        if view.next:
            screen.command("next", *view.next)

    return Report(compose)


def _items(screen: Screen, items: Sequence[Item], *, verbose: bool) -> None:
    found = [item for item in items if verbose or not getattr(item, "verbose", False)]
    if found:
        screen.blank()
    labels = [item.label for item in found if isinstance(item, Row | Listing)]
    above = ""
    for item in found:
        if isinstance(item, Table):
            _table(screen, item, verbose=verbose)
        elif isinstance(item, Row | Listing):
            label = "" if item.label == above else item.label
            indent = _indent(labels, item.label)
            if isinstance(item, Row):
                _row(screen, item, label, indent, verbose=verbose)
            else:
                _listing(screen, item, label, indent, verbose=verbose)
        above = getattr(item, "label", "")


def _indent(labels: Sequence[str], label: str) -> int:
    """Where text begins: the same for all labels that begin at the same column."""
    inner = label.startswith(" ")
    longest = max((len(one) for one in labels if one.startswith(" ") == inner), default=0)
    return longest + 2 if inner else max(LABEL, longest + 1)


def _row(screen: Screen, row: Row, label: str, indent: int, *, verbose: bool) -> None:
    if row.tone == "command":
        screen.command(label, row.value)
        return
    style = _STYLES.get(row.tone, "")
    most = 0 if verbose else row.most
    value = (row.value, style if row.tone in ("plain", "quiet", "caution") else f"bold {style}".strip())
    screen.say(label, value, row.note, (row.aside, "dim"), indent=indent, most=most, style=_weight(label))


def _weight(label: str) -> str:
    return "" if label.startswith(" ") else "bold"


def _listing(screen: Screen, found: Listing, label: str, indent: int, *, verbose: bool) -> None:
    entries = [words.printable(entry) for entry in found.entries]
    if verbose or found.each:
        shown = entries if verbose or not found.most else entries[: found.most]
        for number, entry in enumerate(shown):
            head = (label, found.lead) if number == 0 else ("", "")
            screen.say(head[0], head[1], entry, indent=indent, most=0 if verbose else CELL_LINES, style=_weight(label))
        if len(shown) < len(entries):
            screen.say("", (f"{len(entries) - len(shown):,} more: --verbose", "dim"), indent=indent)
        return
    lengths = itertools.accumulate(cell_len(entry) + 2 for entry in entries)
    fitting = sum(length <= LIST_LINES * (screen.width - indent) - 26 for length in lengths)
    shown = entries[: found.most or max(fitting, 1)]  # the first one whole: what ends it may be the reason for it
    left = len(entries) - len(shown)
    more = [f"{left:,} more: --verbose"] if left else []
    screen.say(label, found.lead, ", ".join([*shown, *more]), indent=indent, style=_weight(label))


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(screen: Screen, found: Table, *, verbose: bool) -> None:
    columns = found.whole if verbose and found.whole else found.screen
    looks = found.looks or (Look(),) * len(found.rows)
    rows = [
        (_cells(row, columns), look) for row, look in zip(found.rows, looks, strict=True) if verbose or not look.minor
    ]
    layout = _Layout(screen, _cells(found.head, columns), rows)
    screen.row((layout.head(), "bold"))
    for cells, look in rows:
        layout.show(cells, look, verbose=verbose)
    if len(rows) < len(found.rows):
        screen.row(f"  {len(found.rows) - len(rows):,} more: --verbose")


def _cells(row: Sequence[str], columns: Sequence[int]) -> tuple[str, ...]:
    return tuple(words.printable(row[column]) if column != NOTHING else "" for column in columns)


class _Layout:
    """Where the columns of one table are: a name, a mark or a bar, numbers, and text to the end of the line."""

    def __init__(self, screen: Screen, heads: Sequence[str], rows: Sequence[tuple[tuple[str, ...], Look]]) -> None:
        self.screen = screen
        self.heads = heads
        self.marked = any(look.mark for _, look in rows)
        self.bar = 0
        if any(look.bar is not None for _, look in rows):
            self.bar = min(max(BAR - (80 - screen.width), NARROW_BAR), BAR)
        self.name = self._name([cell_len(cells[0]) + 2 * look.depth for cells, look in rows])
        self.begin = 2 + self.name + (1 if self.marked else 0) + self.bar
        spare = any(cells[-1] for cells, _ in rows)  # a head without one beside it may reach further
        own = [cell_len(head) if after or not spare else 0 for head, after in itertools.pairwise(heads)]
        self.widths = [max([own[n], *(cell_len(cells[n]) for cells, _ in rows)]) for n in range(1, len(heads) - 1)]
        self.tail = self.begin + sum(2 + width for width in self.widths) + 2

    def _name(self, lengths: Sequence[int]) -> int:
        needed = max(lengths, default=0)
        if self.marked:
            return min(max(needed, NAME), MOST_NAME + (self.screen.width - 80) // 2)
        return needed + 2 if self.bar else max(needed, cell_len(self.heads[0]) - 2)

    def head(self) -> str:
        line, at = self.heads[0], self.begin
        for text, width in zip(self.heads[1:-1], self.widths, strict=True):
            line = _put(line, at + 2 + (0 if _is_interval(text) else max(width - cell_len(text), 0)), text)
            at += 2 + width
        return _put(line, self.tail, self.heads[-1])

    def show(self, cells: Sequence[str], look: Look, *, verbose: bool) -> None:
        screen = self.screen
        indent = 2 * look.depth
        first, *more = screen.folded(cells[0], self.name - indent)
        bare = not any(cells[1:-1])
        tail = self.begin + 2 + self.marked if bare else self.tail
        rest = self._last(cells[-1], look, screen.width - tail, verbose=verbose)
        numbers = f"{'' if bare else self._numbers(cells[1:-1])}  {rest[0]}"
        bold = "bold" if look.chosen else ""
        screen.row(
            ("▸ " if look.chosen else "  ", "bold"),
            (" " * indent + screen.fit(first, self.name - indent), bold),
            (f" {MARKS.get(look.mark, ' ')}" if self.marked else "", _MARK_STYLES.get(look.mark, "")),
            (screen.bar(look.bar or 0.0, self.bar) if self.bar else "", "cyan"),
            (numbers[1:] if self.marked and not bare else numbers, _STYLES.get(look.tone, "")),
        )
        for name, text in itertools.zip_longest(more, rest[1:], fillvalue=""):
            left = screen.fit(f"{' ' * (indent + 2)}{name}" if name else "", self.name)
            screen.row(f"  {left}{' ' * (tail - 2 - self.name)}{text}")
        for note in look.notes if verbose else ():
            screen.say("", (note, "dim"), indent=6)

    def _numbers(self, cells: Sequence[str]) -> str:
        text = ""
        for cell, width in zip(cells, self.widths, strict=True):
            gap = " " * (width - cell_len(cell))
            text += f"  {cell}{gap}" if _is_interval(cell) else f"  {gap}{cell}"
        return text

    def _last(self, text: str, look: Look, room: int, *, verbose: bool) -> list[str]:
        """The text at the end, in lines: in fewer words where it is too long and not everything is asked for."""
        brief = "" if verbose or cell_len(text) <= room else look.brief
        lines = self.screen.folded(brief or text, room)
        if len(lines) > CELL_LINES and not verbose:
            lines = [*lines[: CELL_LINES - 1], self.screen.ended(lines[CELL_LINES - 1], room)]
        return lines


def _put(line: str, at: int, text: str) -> str:
    return line if not text else line.ljust(at) + text if cell_len(line) < at else f"{line} {text}"


def _is_interval(text: str) -> bool:
    """What stands at the left of its column, as all intervals do."""
    return text.startswith(("[", "95 %")) or text.endswith((" pair", " pairs"))
