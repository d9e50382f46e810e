"""What does a terminal show of the stores on the disk? A table, and what became of those that were to be removed.

In: `KeptStore` records. Out: a `Report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from flatout.records.store_folder import KeptStore, Removed
from flatout.report import words
from flatout.report.screen import Report, Screen

_HEADS = ("store", "items", "size", "last used", "state", "of")


def stores(kept: Sequence[KeptStore], *, now_unix_s: float) -> Report:
    """Every store on the disk.

    Args:
        kept: The stores, in the order in which they are shown.
        now_unix_s: The present.
    """

    def compose(screen: Screen) -> None:
        if not kept:
            screen.row("no store is kept; `flatout run --keep-store SCRIPT` keeps items on the disk")
            return
        rows = [_cells(one, now_unix_s) for one in kept]
        widths = [max(len(row[column]) for row in (_HEADS, *rows)) for column in range(len(_HEADS))]
        for row in (_HEADS, *rows):
            cells = [
                cell.rjust(width) if column in (1, 2) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            screen.row(("  ".join(cells).rstrip(), "bold" if row is _HEADS else ""))
        screen.blank()
        total = sum(one.size_bytes for one in kept)
        screen.say("together", f"{words.plural(len(kept), 'store')}, {words.memory(total)}")
        screen.command("next", "flatout store rm", kept[-1].name)

    return Report(compose)


def _cells(one: KeptStore, now_unix_s: float) -> tuple[str, ...]:
    items = "?" if one.num_items is None else words.count(one.num_kept)
    if one.num_kept != one.num_items:
        items += f" of {words.count(one.num_items)}"
    of = f"{one.dataset} in {PurePath(one.script).name}" if one.script else one.dataset
    return (
        one.name,
        items,
        words.memory(one.size_bytes),
        words.age(now_unix_s - one.used_unix_s),
        one.state + ", in use" * one.in_use,
        words.printable(of),
    )


def removed(done: Removed) -> Report:
    """What was removed, and what was not."""

    def compose(screen: Screen) -> None:
        gone = ", ".join(done.names)
        freed = words.memory(done.freed_bytes)
        screen.row(f"removed {gone}: {freed} freed" if gone else "nothing was removed")
        for name in done.in_use:
            screen.row(f"{name} stays: a run uses it")
        for name in done.others:
            screen.row(f"the folder of {name} stays: other files lie in it")

    return Report(compose)
