"""How is a result shown? In: a `Result`. Out: its page as a file, and on stdout the terminal report or JSON."""

from __future__ import annotations

import json
from pathlib import Path

from flatout.cli import tell
from flatout.errors import UsageError
from flatout.report import print_result, write_html
from flatout.result import Result, summary_of


def show(result: Result, *, html: Path | None = None, as_json: bool, verbose: bool = False) -> None:
    """Write the page, to `html` or into the run folder, and print the rest; what `why` found is always shown whole.

    Raises:
        UsageError: The page was asked for, and cannot be written there. In the run folder that is only said: what was
            measured must not be lost for it.
    """
    page = html or Path(result.run) / "report.html"
    try:
        write_html(result, page)
    except OSError as problem:
        cause = str(problem.strerror or problem)
        if html is not None:
            hint = "`--html FILE` in a folder of yours"
            raise UsageError(f"cannot write `{html}`", cause=cause, hint=hint) from None
        tell(f"flatout: cannot write `{page}`: {cause}")
    if as_json:
        print(json.dumps(summary_of(result)))
    else:
        print_result(result, page=page, verbose=verbose or result.command == "why")
