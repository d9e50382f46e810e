"""`flatout why`: parse, call, print."""

from __future__ import annotations

import click

from flatout.cli import options


@click.command("why", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@click.option("--budget", metavar="TIME", help="Aim to be done in this time.  [default: 1m; more where steps are slow]")
@options.terms
@options.as_json
@options.script_words
def command(
    words: tuple[str, ...], module: str | None, budget: str | None, allow_writes: bool, start_limit: str, as_json: bool
) -> None:
    """Measure where each step of SCRIPT goes, and what holds it back. Nothing is tried, nothing changed.

    \b
    Example:  flatout why train.py --epochs 3
    Next:     flatout tune train.py --epochs 3
    """  # noqa: D301
    from flatout import api
    from flatout.cli.progress import measured
    from flatout.cli.showing import show as show_result
    from flatout.run.script import from_words

    goal = api.Goal(
        budget_s=None if budget is None else options.seconds(budget, "--budget"),
        terms=api.Terms(isolate=not allow_writes, start_limit_s=options.seconds(start_limit, "--start-limit")),
    )
    script = from_words(words, module)
    measured(lambda show: api.why(script, goal=goal, show=show), lambda found: show_result(found, as_json=as_json))
