"""How is a result shown? In: a `Result`, or two side by side. Out: a page as a file, and on stdout a report or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli import tell
from flatout.errors import UsageError
from flatout.judge.result import Result, summary_of
from flatout.judge.samples import gather
from flatout.records import output_file
from flatout.records.as_json import to_json
from flatout.report import (
    PAGE,
    print_contrast,
    print_exported,
    print_proof,
    print_rank_anatomy,
    print_result,
    write_contrast,
    write_html,
    write_proof,
    write_rank_anatomy,
)

if TYPE_CHECKING:
    from flatout.judge.contrast import Contrast
    from flatout.judge.proof import Proof
    from flatout.judge.rank_steps import RankAnatomy
    from flatout.report.former import Exported


def show(result: Result, *, html: Path | None = None, as_json: bool, verbose: bool = False) -> None:
    """Write the page, to `html` or into the run folder, and print the rest; what `why` found is always shown whole.

    Raises:
        UsageError: The page was asked for, and cannot be written there, or would overwrite what is no page. In the run
            folder that is only said: what was measured must not be lost for it.
    """
    page = html or Path(result.run) / PAGE
    samples = gather(Path(result.run)) if result.run else None
    _write_page(page, html is not None, lambda path: write_html(result, path, samples))
    if as_json:
        print(json.dumps(summary_of(result)))
    else:
        print_result(result, page=page, verbose=verbose or result.command == "why")


def show_rank_anatomy(found: RankAnatomy, *, html: Path | None = None, as_json: bool) -> None:
    """Write the page of what `why --ranks` found, to `html` or into the run folder, and print the rest.

    Raises:
        UsageError: The page was asked for, and cannot be written there, or would overwrite what is no page.
    """
    from flatout.judge import rank_steps

    page = html or Path(found.run) / PAGE
    _write_page(page, html is not None, lambda path: write_rank_anatomy(found, path))
    if as_json:
        print(json.dumps(rank_steps.summary_of(found)))
    else:
        print_rank_anatomy(found, page=page)


def show_contrast(found: Contrast, *, html: Path | None, as_json: bool) -> None:
    """Print two runs side by side; their page is written where it was asked for.

    Raises:
        UsageError: It cannot be written there, or would overwrite what is no page.
    """
    from flatout.judge import contrast

    if html is not None:
        _write_page(html, True, lambda path: write_contrast(found, path))
    if as_json:
        print(json.dumps(contrast.summary_of(found)))
    else:
        print_contrast(found, page=html)


def show_proof(found: Proof, *, html: Path | None = None, as_json: bool) -> None:
    """Write the page of a proof, to `html` or into the run folder, and print the rest.

    Raises:
        UsageError: The page was asked for, and cannot be written there, or would overwrite what is no page.
    """
    from flatout.judge import proof

    page = html or Path(found.run) / PAGE
    _write_page(page, html is not None, lambda path: write_proof(found, path))
    if as_json:
        print(json.dumps(to_json(proof.summary_of(found))))
    else:
        print_proof(found, page=page)


def show_exported(done: Exported, *, as_json: bool) -> None:
    """Say what was written for other programs."""
    if as_json:
        print(json.dumps(to_json(done)))
    else:
        print_exported(done)


def _write_page(page: Path, asked: bool, write: Callable[[Path], object]) -> None:
    """Write a page; that one which nobody asked for cannot be written is only said.

    Raises:
        UsageError: It was asked for, where something else is or where nothing can be written.
    """
    if asked:
        output_file.check(page, output_file.PAGE, option="--html")
    try:
        write(page)
    except OSError as problem:
        cause = str(problem.strerror or problem)
        if asked:
            raise UsageError(f"cannot write `{page}`", cause=cause, hint="`--html FILE` in a folder of yours") from None
        tell(f"flatout: cannot write `{page}`: {cause}")
