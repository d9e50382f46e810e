"""What a terminal and a page show of a record, as text."""

from dataclasses import replace
from pathlib import Path

from flatout.report import PAGE, page, screen, terminal, view_of


def on_screen(record, *, width=80, verbose=False):
    """What a terminal shows; where the record has a run folder, its page is in it."""
    run = getattr(record, "run", "")
    view = replace(view_of(record), page=str(Path(run) / PAGE) if run else "")
    return screen.plain(terminal.report(view, verbose=verbose), width=width)


def on_page(record):
    """The page."""
    return page.text(view_of(record))
