"""How do lines fit a terminal? Labelled paragraphs, rows cut to width, bars.

In: words with styles. Out: lines that are never wider than the terminal (single words that nobody may cut, such as
paths, apart), as a `rich` renderable.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import IO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from flatout.report.words import TOKEN, printable, unbroken

NARROWEST = 60
WIDEST = 120
"""Outside of these, lines are set as if the terminal were this wide: a line of 200 columns is hard to read."""

LABEL = 11
"""Columns of the labels on the left."""

Part = str | tuple[str, str]
"""Text, or text with a `rich` style."""

_EIGHTHS = " ▏▎▍▌▋▊▉"
_GLUE = "\ue000"
"""Stands for a space at which no line may break, until the lines are broken."""


class Report:
    """Something that `rich` prints, laid out for the width of the console that it is printed on."""

    def __init__(self, compose: Callable[[Screen], None]) -> None:
        self._compose = compose

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        screen = Screen(console, options.max_width)
        self._compose(screen)
        yield from screen.lines


class Screen:
    """Collects lines for one width.

    Args:
        console: Breaks the lines.
        width: Columns of the terminal.
    """

    def __init__(self, console: Console, width: int) -> None:
        self.width = min(max(width, NARROWEST), WIDEST)
        self.lines: list[Text] = []
        self._console = console

    def text(self, *parts: Part) -> Text:
        """Parts put together."""
        line = Text(no_wrap=True, overflow="ignore", end="\n")
        for part in parts:
            words, style = (part, "") if isinstance(part, str) else part
            line.append(printable(words), style or None)
        return line

    def blank(self) -> None:
        """An empty line, but never two, and none at the top."""
        if self.lines and self.lines[-1].plain:
            self.lines.append(self.text())

    def row(self, *parts: Part) -> None:
        """One line, cut where it does not fit."""
        line = self.text(*parts)
        if line.cell_len > self.width:
            line.truncate(self.width - 1, overflow="crop")
            line.append("…")
        line.rstrip()
        self.lines.append(line)

    def say(self, label: str, *parts: Part, indent: int = LABEL, most: int = 0, style: str = "bold") -> None:
        """A paragraph beside its label, broken between words; cut after `most` lines where that is given."""
        body = self.text(*parts)
        body.plain = unbroken(body.plain, _GLUE)
        body.no_wrap = False
        broken = body.wrap(self._console, self.width - indent, overflow="fold")
        for number, line in enumerate(broken):
            line.plain = line.plain.replace(_GLUE, " ")
            line.rstrip()
            head = printable(label) if number == 0 else ""
            row = self.text((head.ljust(indent), style))
            row.append_text(line)
            if most and number + 1 == most and len(broken) > most:
                row.truncate(self.width - 1 - 1, overflow="crop")
                row.append(" …")
            row.rstrip()
            self.lines.append(row)
            if most and number + 1 == most:
                return

    def command(self, label: str, *words: str) -> None:
        """A command that can be copied: broken only between arguments, with a backslash."""
        tokens = [token for text in words for token in TOKEN.findall(printable(text)) or [printable(text)]]
        lines = [""]
        for token in tokens:
            if lines[-1] and LABEL + 2 + cell_len(lines[-1]) + 1 + cell_len(token) > self.width - 2:
                lines.append("")
            lines[-1] += (" " if lines[-1] else "") + token
        for number, line in enumerate(lines):
            head = label.ljust(LABEL) if number == 0 else " " * (LABEL + 2)
            tail = " \\" if number + 1 < len(lines) else ""
            row = self.text((head, "bold"), line + tail)
            row.rstrip()
            self.lines.append(row)

    def fit(self, text: str, cells: int) -> str:
        """Text in exactly so many columns, cut with an ellipsis where it is longer."""
        text = printable(text)
        if cell_len(text) > cells:
            text = set_cell_size(text, max(cells - 1, 0)).rstrip() + "…"
        return set_cell_size(text, cells)

    def ended(self, text: str, cells: int) -> str:
        """A line in at most so many columns, with an ellipsis behind its last whole word, for more would follow."""
        while " " in text and cell_len(text) + 1 > cells:
            text = text.rpartition(" ")[0]
        return self.fit(f"{text.rstrip(' ,;:')}…", cells).rstrip()

    def bar(self, share: float, cells: int) -> str:
        """A bar over that share of so many columns; what is not zero shows."""
        eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
        eighths = max(eighths, 1) if share > 0 else 0
        full, rest = divmod(eighths, 8)
        return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(cells)

    def folded(self, text: str, cells: int) -> list[str]:
        """Text broken between words into lines of at most so many columns; longer words are cut."""
        lines = [""]
        for word in printable(text).split():
            if lines[-1] not in ("", "+") and cell_len(lines[-1]) + 1 + cell_len(word) > cells:
                lines.append("")
            lines[-1] += (" " if lines[-1] else "") + word
        return [self.fit(line, min(cell_len(line), cells)).rstrip() for line in lines]


def show(report: Report, file: IO[str] | None = None) -> None:
    """Print on a stream: in colour on a terminal that wants it, plain otherwise."""
    stream = file or sys.stdout
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not isinstance(stream, io.TextIOWrapper):
        return console.print(report, soft_wrap=True)
    former = stream.errors
    stream.reconfigure(errors="backslashreplace")  # one that is not UTF-8 gets what it cannot show as codes
    try:
        console.print(report, soft_wrap=True)
    finally:
        stream.reconfigure(errors=former)
