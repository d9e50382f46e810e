"""What a terminal and a page show of a record, as text."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flatout.report import PAGE, page, terminal, view_of


def as_text(report, *, width=80):
    """What a terminal shows, without colour."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, force_terminal=False, highlight=False).print(
        report, soft_wrap=True
    )
    return stream.getvalue()


def on_screen(record, *, width=80, verbose=False):
    """What a terminal shows; where the record has a run folder, its page is in it."""
    run = getattr(record, "run", "")
    view = replace(view_of(record), page=str(Path(run) / PAGE) if run else "")
    return as_text(terminal.report(view, verbose=verbose), width=width)


def on_page(record):
    """The page."""
    return page.text(view_of(record))
