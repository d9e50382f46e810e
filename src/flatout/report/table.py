"""What is a table of a view? Strings in rows, with what a terminal and a page need to know of them.

In: cells, formatted already. Out: a `Table`; also the words in which a view says what something means to its reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

On = Literal["both", "screen", "page"]

Tone = Literal["", "plain", "good", "bad", "unsure", "quiet", "caution", "command"]
"""What a text means for its reader; each renderer has a look for it. A `command` is typed, and never broken."""

Mark = Literal["", "yes", "even", "no", "never"]
"""Faster with numbers that agree; no difference that could be told; slower or not measured; other numbers."""

NOTHING = -1
"""Instead of a column that a terminal shows at the end, where it shows numbers only."""

MOST_ROWS = 400
"""Rows of one table in the page; the record has the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a terminal shows one row of a table.

    Attributes:
        depth: How far it is indented.
        mark: Its verdict.
        tone: Of its last cell.
        chosen: Whether it is the one that was chosen.
        bar: The share of the column that its bar takes; None without a bar.
        brief: Its last cell in fewer words, where there is little room.
        notes: What is said below it where everything is asked for.
        minor: Whether it is shown only then.
    """

    depth: int = 0
    mark: Mark = ""
    tone: Tone = ""
    chosen: bool = False
    bar: float | None = None
    brief: str = ""
    notes: tuple[str, ...] = ()
    minor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Strings in rows.

    Attributes:
        title: What it holds.
        head: Names of the columns.
        rows: As long as `head` each.
        texts: How many columns from the left are text; the others are numbers.
        left_out: Rows that are not shown.
        links: By column, for each row, which raw samples stand behind its number: an anchor in the page, or empty.
        screen: Which columns a terminal shows, in its order; the last one is text and is broken into lines.
        whole: The same where everything is asked for; empty where that is no difference.
        looks: How a terminal shows each row.
        fold: What the page calls it where it has to be opened first; empty where it is open.
        stack: Whether a telephone shows its cells below each other.
        verbose: Whether a terminal shows it only where everything is asked for.
        on: Where it is shown at all.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    left_out: int = 0
    links: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    screen: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    looks: tuple[Look, ...] = ()
    fold: str = ""
    stack: bool = False
    verbose: bool = False
    on: On = "both"
    kind: ClassVar[str] = "table"


def table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: int = 1,
    links: Mapping[int, Sequence[str]] | None = None,
) -> Table:
    """A table for the page, cut where it would make the page heavy; `shown` puts it on a terminal, too."""
    found = [tuple(row) for row in rows]
    return Table(
        title=title,
        head=tuple(head),
        rows=tuple(found[:MOST_ROWS]),
        texts=texts,
        left_out=max(len(found) - MOST_ROWS, 0),
        links={column: tuple(anchors) for column, anchors in (links or {}).items()},
        on="page",
    )


def shown(
    found: Table, columns: Sequence[int], looks: Sequence[Look] = (), *, whole: Sequence[int] = (), on: On = "both"
) -> Table:
    """The same table on a terminal, too, which shows these columns; `whole` are those where everything is asked for."""
    return replace(found, screen=tuple(columns), whole=tuple(whole), looks=tuple(looks), on=on)


def folded(found: Table, words: str) -> Table:
    """The same table, which the page shows when it is asked for."""
    return replace(found, fold=words)
