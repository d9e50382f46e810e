"""What is shown of any result? A headline, a verdict, and sections of rows, lists, tables and figures.

In: what the file of a kind of result says. Out: a `View`, which `terminal.py` and `page.py` draw. Everything in it is
text that was formatted already, or the data of a figure; nothing is markup, and nothing knows how it will be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from flatout.report.drawing import Drawing
from flatout.report.table import On, Table, Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Something with its name: a number with its unit, its interval and what it rests on, or a sentence.

    Attributes:
        label: What it is called; a row without one goes on with the one above it.
        value: What it comes to.
        note: What belongs to it: its interval, its reason.
        aside: What stands beside it.
        tone: Of the value.
        source: Where the page says how it was obtained: an anchor, or empty.
        most: Lines on a terminal unless everything is asked for; 0 for all.
        verbose: Whether a terminal shows it only where everything is asked for.
        on: Where it is shown at all.
    """

    label: str
    value: str = ""
    note: str = ""
    aside: str = ""
    tone: Tone = ""
    source: str = ""
    most: int = 0
    verbose: bool = False
    on: On = "both"
    kind: ClassVar[str] = "row"

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.value}{self.note}{self.aside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Things of one sort.

    Attributes:
        label: What they are.
        entries: The things.
        lead: What is said before them on a terminal.
        title: What the page has above them.
        most: So many on a terminal unless everything is asked for; 0 for as many as two lines hold.
        each: Whether a terminal gives each its own line even then.
        verbose: Whether a terminal shows it only where everything is asked for.
        on: Where it is shown at all.
    """

    label: str
    entries: tuple[str, ...]
    lead: str = ""
    title: str = ""
    most: int = 0
    each: bool = False
    verbose: bool = False
    on: On = "both"
    kind: ClassVar[str] = "listing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing with its caption and the tables of its numbers, on the page.

    A line of the legend is a colour, a shape (`square`, `dot`, `ring`, `cross`), what it stands for, and an anchor.
    """

    drawing: Drawing
    caption: str
    legend: tuple[tuple[str, str, str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    on: On = "page"
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Names with what belongs to each, on the page; `code` where names are what one types."""

    pairs: tuple[tuple[str, str], ...]
    title: str = ""
    code: bool = False
    on: On = "page"
    kind: ClassVar[str] = "pairs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A command that obtains the result again, on the page."""

    command: str
    on: On = "page"
    kind: ClassVar[str] = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What stands behind a number.

    Attributes:
        anchor: Where it is in the page.
        title: Which number.
        how: How it was obtained, in one sentence.
        command: What to type to obtain it again.
        tables: The samples, where they are in the page.
        missing: Why there are none, where there should be.
        on: Always the page.
    """

    anchor: str
    title: str
    how: str
    command: str
    tables: tuple[Table, ...] = ()
    missing: str = ""
    on: On = "page"
    kind: ClassVar[str] = "evidence"


Item = Row | Listing | Table | Figure | Pairs | Again | Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What belongs together.

    Attributes:
        name: Unique in the view; the page's anchor is `h-` and this.
        title: The page's heading.
        items: From top to bottom.
        lead: Sentences below the heading.
    """

    name: str
    title: str = ""
    items: tuple[Item, ...] = ()
    lead: tuple[str, ...] = ()

    def on(self, where: Literal["screen", "page"]) -> tuple[Item, ...]:
        """What of it is shown there."""
        return tuple(item for item in self.items if item.on in ("both", where))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is shown of one result.

    Attributes:
        command: What made it, e.g. `flatout tune`.
        title: What it is a result of.
        context: What else stands beside that on a terminal: versions, the machine.
        number: The one number, or the verdict in a word.
        unit: What it is a number of.
        sentence: The verdict; on the page the title stands before it.
        source: Where the page says how the number was obtained.
        verdict: The first thing on the page and the last one on a terminal.
        sections: All else.
        next: What to type next: the command with its options, and the script as it was typed.
        created: ISO 8601, UTC.
        version: Of flatout.
        page: Where its page is; empty without one.
    """

    command: str
    title: str
    context: tuple[str, ...] = ()
    number: str = ""
    unit: str = ""
    sentence: str = ""
    source: str = ""
    verdict: tuple[Item, ...] = ()
    sections: tuple[Section, ...] = ()
    next: tuple[str, ...] = ()
    created: str = ""
    version: str = ""
    page: str = ""

    @property
    def anchors(self) -> frozenset[str]:
        """Where the page says how numbers were obtained."""
        items = [item for section in self.sections for item in section.items]
        return frozenset(item.anchor for item in items if isinstance(item, Evidence))


def raw(found: Iterable[Evidence], lead: str) -> Section:
    """The last section of each page: what stands behind its numbers."""
    return Section(name="raw", title="Raw samples", lead=(lead,), items=tuple(found))
