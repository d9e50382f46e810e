"""`flatout tune`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli import options


@click.command("tune", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@click.option(
    "--budget",
    metavar="TIME",
    help="Aim to be done in this time.  [default: 2m; 3m where a step takes over 0.2 s, 5m over 1 s or on a GPU]",
)
@click.option(
    "--levers", "only", metavar="NAMES", help="Try only these, e.g. `bf16,threads`; `input`: for data; `none`: A/A."
)
@click.option("--without", metavar="NAMES", help="Leave these levers out.")
@click.option(
    "--ranks",
    "num_ranks",
    type=int,
    metavar="N",
    help="Under the levers of the plan: is it faster on N ranks, N / 2 ...?",
)
@options.infer
@options.client
@options.goal
@options.accept
@click.option("--plan", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the plan.")
@options.store_memory
@options.terms
@options.as_json
@click.option("-v", "--verbose", is_flag=True, help="Also list what was not tried, and why.")
@options.script_words
def command(  # noqa: PLR0913  one parameter per option
    words: tuple[str, ...], module: str | None, budget: str | None, only: str | None,
    without: str | None, num_ranks: int | None, infers: bool, client: str | None, compared_by: str | None,
    accept: str, plan: Path | None,
    store_memory: str | None, allow_writes: bool, start_limit: str, as_json: bool, verbose: bool,
) -> None:  # fmt: skip
    """Measure SCRIPT, diagnose it, try what could help, and keep what measurably wins.

    \b
    Example:  flatout tune train.py --epochs 3
    Next:     flatout run train.py --epochs 3

    With a launcher (`flatout tune -- torchrun --nproc-per-node 2 train.py`) levers are searched on one of its ranks
    alone, and what wins there is measured on all.

    The script is not changed. Trials run in throwaway children whose writes are discarded. Ctrl-C ends the trying
    and keeps what was learned.
    """  # noqa: D301
    from flatout import api
    from flatout.cli.output import show as show_result
    from flatout.cli.progress import measured
    from flatout.run.launcher_command import launched_by, script_of
    from flatout.run.script import from_words

    launcher = launched_by(words, module, num_ranks)
    script = script_of(words) if launcher else from_words(words, module)
    goal = api.Goal(
        launcher=launcher,
        budget_s=None if budget is None else options.seconds(budget, "--budget"),
        choice=api.Choice(
            accept=accept, only=options.names(only), without=options.names(without) or (), num_ranks=num_ranks
        ),
        terms=api.Terms(
            isolate=not allow_writes,
            start_limit_s=options.seconds(start_limit, "--start-limit"),
            store_memory_bytes=options.size_bytes(store_memory, "--store-memory"),
            infers=infers,
            goal=compared_by or "",
            client=options.client_words(client),
        ),
    )
    measured(
        lambda show: api.tune(script, goal=goal, plan=plan, show=show),
        lambda found: show_result(found, as_json=as_json, verbose=verbose),
    )
