"""`flatout report`: parse, call, print."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from flatout.cli import options
from flatout.errors import UsageError


@click.command("report")
@click.option("--html", "html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page here.")
@click.option(
    "--export",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write every step: `.csv` is a table, `.json` a trace for Perfetto.",
)
@options.as_json
@click.option("-v", "--verbose", is_flag=True, help="Also list what was not tried, and why.")
@click.argument("runs", nargs=-1, metavar="[RUN]")
def command(runs: tuple[str, ...], html: Path | None, file: Path | None, as_json: bool, verbose: bool) -> None:
    """Show a former result again; RUN is a folder or a name under `.flatout/`, the newest without it.

    \b
    Example:  flatout report lenet-3 --html lenet.html
              flatout report lenet-3 --export steps.csv
    """  # noqa: D301
    from flatout import api
    from flatout.cli.output import show
    from flatout.records.as_json import to_json
    from flatout.report import print_view
    from flatout.report.export import written
    from flatout.report.run_folders import record

    if len(runs) > 1:
        each = ", ".join(f"`flatout report --json {shlex.quote(run)}`" for run in runs)
        raise UsageError(
            f"`flatout report` shows one run, and {len(runs)} are named",
            cause="they were not measured in turn, and of such runs nothing can be concluded",
            hint=f"their numbers one by one: {each}; `flatout tune` and `flatout prove` measure in turn",
        )
    run = runs[0] if runs else None
    if file is not None:
        if html is not None:
            raise UsageError(
                "`--export` and `--html` at once",
                cause="it writes the steps of one run, and nothing else",
                hint=f"`flatout report {run or ''} --export {file}`".replace("  ", " "),
            )
        done = api.export(run, file)
        if as_json:
            print(json.dumps(to_json(done)))
        else:
            print_view(written(done))
    else:
        show(record(run), html=html, as_json=as_json, verbose=verbose)
