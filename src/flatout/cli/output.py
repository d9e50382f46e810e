"""How is a record shown? In: a record. Out: its page as a file, and on stdout a report or JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flatout.cli import tell
from flatout.errors import UsageError
from flatout.records import output_file
from flatout.report import PAGE, Record, json_text, print_view, view_of, write_page
from flatout.report.view import View


def show(record: Record, *, html: Path | None = None, as_json: bool, verbose: bool = False) -> None:
    """Write the page, to `html` or into the run folder, and print the rest; what `why` found is always shown whole.

    Raises:
        UsageError: The page was asked for, and cannot be written there, or would overwrite what is no page. In the run
            folder that is only said: what was measured must not be lost for it.
    """
    view = view_of(record)
    page = html or Path(record.run) / PAGE
    _write_page(view, page, asked=html is not None)
    view = replace(view, page=str(page))
    if as_json:
        print(json_text(record))
    else:
        print_view(view, verbose=verbose or view.command == "flatout why")


def _write_page(view: View, page: Path, *, asked: bool) -> None:
    """Write a page; that one which nobody asked for cannot be written is only said.

    Raises:
        UsageError: It was asked for, where something else is or where nothing can be written.
    """
    if asked:
        output_file.check(page, output_file.PAGE, option="--html")
    try:
        write_page(view, page)
    except OSError as problem:
        cause = str(problem.strerror or problem)
        if asked:
            raise UsageError(f"cannot write `{page}`", cause=cause, hint="`--html FILE` in a folder of yours") from None
        tell(f"flatout: cannot write `{page}`: {cause}")
