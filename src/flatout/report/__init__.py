"""How is a record shown? On a terminal, as one HTML page, or as JSON; nothing is computed here but what is displayed.

In: a `Result`, ceilings or levers. Out: printed lines, files, text. Importing this package imports no library: `rich`
comes with the first print, `jinja2` and `matplotlib` with the first page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flatout.judge.result import Result, summary_of
from flatout.records.ceilings import Ceiling, Ceilings

if TYPE_CHECKING:
    from flatout.judge.contrast import Contrast
    from flatout.judge.proof import Proof
    from flatout.judge.rank_steps import RankAnatomy
    from flatout.judge.samples import Samples
    from flatout.records.energy import Log
    from flatout.report.contrast_terminal import Exported
    from flatout.report.levers import LeverRow

PAGE = "report.html"
"""The page's name in a run folder."""


def json_text(result: Result) -> str:
    """What `--json` prints: `flatout.judge.result.summary_of` as JSON, with null for what is not a finite number."""
    return json.dumps(_finite(summary_of(result)), allow_nan=False)


def write_html(result: Result, path: Path | str, samples: Samples | None = None) -> Path:
    """Write the page whole or not at all; returns its path.

    Args:
        result: What to show.
        path: Of the file; its folder must be there.
        samples: What the traces of its run folder hold, for the numbers of the page to lead to.

    Raises:
        OSError: The file cannot be written.
    """
    from flatout.report import html

    return html.write_html(result, path, samples)


def print_result(
    result: Result, *, page: Path | str | None = None, verbose: bool = False, file: IO[str] | None = None
) -> None:
    """Print what `tune` or `why` found.

    Args:
        result: What to show.
        page: Where its page was written; in the run folder without it.
        verbose: Everything instead of one screen.
        file: A stream; stdout without it.
    """
    from flatout.report import screen, terminal

    show = terminal.tune if result.command == "tune" else terminal.why
    screen.show(show(result, verbose=verbose, page=page), file)


def write_contrast(found: Contrast, path: Path | str) -> Path:
    """Write the page of two runs side by side, whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    from flatout.report import contrast_page

    return contrast_page.write_html(found, path)


def print_contrast(found: Contrast, *, page: Path | str | None = None, file: IO[str] | None = None) -> None:
    """Print two runs side by side; `page` is where their page was written."""
    from flatout.report import contrast_terminal, screen

    screen.show(contrast_terminal.contrast(found, page=page), file)


def write_proof(found: Proof, path: Path | str) -> Path:
    """Write the page of a proof, whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    from flatout.report import proof_page

    return proof_page.write_html(found, path)


def print_proof(found: Proof, *, page: Path | str | None = None, file: IO[str] | None = None) -> None:
    """Print a proof; `page` is where its page was written."""
    from flatout.report import proof_terminal, screen

    screen.show(proof_terminal.proof(found, page=page), file)


def write_rank_anatomy(found: RankAnatomy, path: Path | str) -> Path:
    """Write the page of the steps of ranks, whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    from flatout.report import rank_steps_page

    return rank_steps_page.write_html(found, path)


def print_rank_anatomy(found: RankAnatomy, *, page: Path | str | None = None, file: IO[str] | None = None) -> None:
    """Print what `why --ranks` found; `page` is where its page was written."""
    from flatout.report import rank_anatomy, screen

    screen.show(rank_anatomy.rank_anatomy(found, page=page), file)


def print_exported(done: Exported, *, file: IO[str] | None = None) -> None:
    """Print what was written for other programs."""
    from flatout.report import contrast_terminal, screen

    screen.show(contrast_terminal.exported(done), file)


def print_machine(
    ceilings: Ceilings, *, now_unix_s: float | None = None, file: IO[str] | None = None, energy: Log | None = None,
    exchanges: Sequence[Ceiling] = (),
) -> None:  # fmt: skip
    """Print this machine, its ceilings and its energy counters; `now_unix_s` is the present, for their age.

    `exchanges` is what ranks exchange at most.
    """
    import time

    from flatout.report import machine, screen

    now_s = time.time() if now_unix_s is None else now_unix_s
    screen.show(machine.machine(ceilings, exchanges=exchanges, now_unix_s=now_s, energy=energy), file)


def print_levers(rows: Sequence[LeverRow], *, typed: str = "SCRIPT", file: IO[str] | None = None) -> None:
    """Print every lever, by class; `typed` is the script that they were looked at beside."""
    from flatout.report import levers, screen

    screen.show(levers.levers(rows, typed), file)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
