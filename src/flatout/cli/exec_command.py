"""`flatout exec`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli import options


@click.command("exec", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@click.option("--plan", type=click.Path(dir_okay=False, path_type=Path), help="The plan to run under.")
@click.option("--levers", "lever_names", metavar="NAMES", help="Engage exactly these, e.g. `bf16,threads=1`; no plan.")
@options.accept
@options.store_memory
@options.json_file
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENTS]...")
def command(  # noqa: PLR0913  one parameter per option
    words: tuple[str, ...], plan: Path | None, lever_names: str | None, accept: str,
    store_memory: str | None, json_file: Path | None, quiet: bool,
) -> None:  # fmt: skip
    """Run any launcher; flatout reaches every Python process that it starts (not those with -I, -E or -S).

    \b
    Example:  flatout exec -- torchrun --nproc-per-node 2 train.py
    """  # noqa: D301
    from flatout import api
    from flatout.cli.foreground import run_in_foreground

    request = api.RunRequest(
        launcher=words,
        plan=plan,
        levers=options.names(lever_names),
        accept=accept,
        fixed=True,
        store_memory_bytes=options.size_bytes(store_memory, "--store-memory"),
    )
    run_in_foreground(request, json_file=json_file, quiet=quiet)
