"""`flatout run`: parse, call, print."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import click
from click.core import ParameterSource

from flatout.cli import options


@click.command("run", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@click.option("--plan", type=click.Path(dir_okay=False, path_type=Path), help="The plan to run under.")
@click.option(
    "--levers", "lever_names", metavar="NAMES", help="Engage exactly these, e.g. `bf16,threads=1`, `input`; no plan."
)
@options.infer
@options.accept
@click.option(
    "--fixed", is_flag=True, help="Never toggle a lever: two runs are as equal as the levers are deterministic."
)
@click.option("--recheck", is_flag=True, help="Test a plan that was made elsewhere before trusting it.")
@click.option("--learn", is_flag=True, help="No plan: try levers on this very run, and go on under what wins.")
@options.ranks
@options.store_memory
@options.json_file
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Also say what is replaced in the script's process.")
@functools.partial(options.terms, prefix="with `--recheck`: ")
@options.script_words
def command(  # noqa: PLR0913  one parameter per option
    words: tuple[str, ...], module: str | None, plan: Path | None, lever_names: str | None, infers: bool,
    accept: str, fixed: bool,
    recheck: bool, learn: bool, num_ranks: int | None, mode: str, hang_timeout: str, nnodes: int,
    node_rank: int, rdzv_endpoint: str | None,
    store_memory: str | None, json_file: Path | None, quiet: bool, verbose: bool,
    allow_writes: bool, start_limit: str,
) -> None:  # fmt: skip
    """Run SCRIPT under its plan; stdout, files and exit code are the script's own.

    \b
    Example:  flatout run train.py --epochs 3

    Without a plan the script runs plainly. The plan is checked in the first windows of this very run where its levers
    can be toggled, and released where it is slower.
    """  # noqa: D301
    from flatout import api
    from flatout.cli.foreground import run_in_foreground
    from flatout.run.script import from_words

    limit_s = options.seconds(start_limit, "--start-limit")
    memory_bytes = options.size_bytes(store_memory, "--store-memory")
    request = api.RunRequest(
        script=from_words(words, module),
        plan=plan,
        levers=options.names(lever_names),
        accept=_accepted(accept, learn=learn),
        fixed=fixed,
        recheck=recheck,
        learn=learn,
        infers=infers,
        ranks=options.rank_terms(
            num_ranks, mode, hang_timeout, options.nodes(num_ranks or 1, nnodes, node_rank, rdzv_endpoint)
        ),
        hang_timeout_s=options.patience(hang_timeout),
        store_memory_bytes=memory_bytes,
    )
    if recheck:  # only then something is measured, and what measures takes a while to load
        terms = api.Terms(
            isolate=not allow_writes, start_limit_s=limit_s, store_memory_bytes=memory_bytes, infers=infers
        )
        request = dataclasses.replace(request, terms=terms)
    run_in_foreground(request, json_file=json_file, quiet=quiet, verbose=verbose)


def _accepted(accept: str, *, learn: bool) -> str:
    """How far levers may go; a run that tries them on itself goes as far as rounding unless more was asked for."""
    source = click.get_current_context().get_parameter_source("accept")
    return "rounding" if learn and source is ParameterSource.DEFAULT else accept
