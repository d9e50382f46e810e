"""`flatout report`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli import options


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
    from flatout.cli.showing import show

    show(api.report(run), html=html, as_json=as_json, verbose=verbose)
