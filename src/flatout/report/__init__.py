"""How is a record shown? On a terminal, as one HTML page, or as JSON; nothing is computed here but what is displayed.

In: a record. Out: its `View`, printed or written; or its summary. Importing this package imports no library: `rich`
comes with the first print, `jinja2` with the first page.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flatout.judge import proof as proofs
from flatout.judge import rank_steps as steps_of_ranks
from flatout.judge import result as results
from flatout.judge.proof import Proof
from flatout.judge.rank_steps import RankAnatomy
from flatout.judge.result import Result
from flatout.records.as_json import to_json

if TYPE_CHECKING:
    from flatout.report.view import View

PAGE = "report.html"
"""The page's name in a run folder."""

Record = Result | Proof | RankAnatomy
"""What can be shown: what `tune` or `why` found, a proof, the steps of ranks."""

_KINDS: dict[type, tuple[str, Any]] = {
    Result: ("tuning", results),
    Proof: ("proof", proofs),
    RankAnatomy: ("rank_steps", steps_of_ranks),
}
"""The file here that says what is shown of each, and where its summary is made."""


def view_of(record: Record) -> View:
    """What is shown of a record."""
    view: View = importlib.import_module(f"flatout.report.{_KINDS[type(record)][0]}").view(record)
    return view


def summary_of(record: Record) -> dict[str, Any]:
    """What `--json` prints of a record; a number that is not known is None."""
    value: dict[str, Any] = to_json(_KINDS[type(record)][1].summary_of(record))
    return value


def json_text(record: Record) -> str:
    """The same as text."""
    return json.dumps(summary_of(record), allow_nan=False)


def print_view(view: View, *, verbose: bool = False, file: IO[str] | None = None) -> None:
    """Print a view.

    Args:
        view: What to show.
        verbose: Everything instead of about one screen.
        file: A stream; stdout without it.
    """
    from flatout.report import screen, terminal

    screen.show(terminal.report(view, verbose=verbose), file)


def write_page(view: View, path: Path | str) -> Path:
    """Write the page of a view whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    from flatout.report import page

    return page.write(view, path)
