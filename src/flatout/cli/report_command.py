"""`flatout report`: parse, call, print."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from flatout.cli import options
from flatout.errors import UsageError


@click.command("report")
@click.option("--html", "html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page here.")
@options.as_json
@click.option("-v", "--verbose", is_flag=True, help="Also list what was not tried, and why.")
@click.argument("run", required=False)
def command(run: str | None, html: Path | None, as_json: bool, verbose: bool) -> None:
    """Show a former result again; RUN is a folder or a name under `.flatout/`, the newest without it.

    \b
    Example:  flatout report lenet-3 --html lenet.html
    """  # noqa: D301
    from flatout import api
    from flatout.report import print_result, write_html
    from flatout.result import summary_of

    result = api.report(run)
    page = html or Path(result.run) / "report.html"
    try:
        write_html(result, page)
    except OSError as problem:
        if html is not None:
            raise UsageError(
                f"cannot write `{html}`",
                cause=str(problem.strerror or problem),
                hint="`--html FILE` in a folder of yours",
            ) from None
        print(f"flatout: cannot write `{page}`: {problem.strerror or problem}", file=sys.stderr)
    if as_json:
        print(json.dumps(summary_of(result)))
    else:
        print_result(result, page=page, verbose=verbose)
