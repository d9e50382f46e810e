"""`flatout why`: parse, call, print."""

from __future__ import annotations

import click

from flatout.cli import options


@click.command("why", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@click.option("--budget", metavar="TIME", help="Aim to be done in this time.  [default: 1m; more where steps are slow]")
@click.option("--ranks", "num_ranks", type=int, metavar="N", help="Take the steps of N ranks apart.")
@options.mode
@options.infer
@options.client
@options.terms
@options.as_json
@options.script_words
def command(  # noqa: PLR0913  one parameter per option
    words: tuple[str, ...], module: str | None, budget: str | None, num_ranks: int | None, mode: str,
    infers: bool, client: str | None, allow_writes: bool, start_limit: str, as_json: bool,
) -> None:  # fmt: skip
    """Measure where each step of SCRIPT goes, and what holds it back. Nothing is tried, nothing changed.

    With a launcher (`flatout why -- torchrun --nproc-per-node 2 train.py`) the steps of all its ranks are taken apart.

    \b
    Example:  flatout why train.py --epochs 3
    Next:     flatout tune train.py --epochs 3
    """  # noqa: D301
    from flatout import api
    from flatout.cli.output import show as show_result
    from flatout.cli.progress import measured
    from flatout.run.launcher_command import launched_by, script_of
    from flatout.run.script import from_words
    from flatout.trials.rank_profile import looked

    launcher = launched_by(words, module, num_ranks)
    goal = api.Goal(
        launcher=launcher,
        budget_s=None if budget is None else options.seconds(budget, "--budget"),
        terms=api.Terms(
            isolate=not allow_writes,
            start_limit_s=options.seconds(start_limit, "--start-limit"),
            infers=infers,
            client=options.client_words(client),
        ),
    )
    script = script_of(words) if launcher else from_words(words, module)
    if launcher or num_ranks is not None or mode != "auto":
        terms = None if launcher else options.rank_terms(num_ranks, mode, start_limit, {})
        measured(lambda show: looked(script, terms, goal, show), lambda found: show_result(found, as_json=as_json))
        return
    measured(lambda show: api.why(script, goal=goal, show=show), lambda found: show_result(found, as_json=as_json))
