"""`flatout levers`: parse, call, print."""

from __future__ import annotations

import functools
import json

import click

from flatout.cli import options


@click.command("levers", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@options.terms
@options.as_json
@functools.partial(options.script_words, metavar="[SCRIPT [ARGUMENTS]...]")
def command(words: tuple[str, ...], module: str | None, allow_writes: bool, start_limit: str, as_json: bool) -> None:
    """Every lever: its name, its class, what it can shorten, and, given SCRIPT, whether it applies.

    \b
    Example:  flatout levers train.py --epochs 3
    Next:     flatout run --levers bf16,channels_last train.py --epochs 3
    """  # noqa: D301
    from flatout import api
    from flatout.report import print_levers
    from flatout.run.script import from_words

    script = from_words(words, module) if words or module else None
    terms = api.Terms(isolate=not allow_writes, start_limit_s=options.seconds(start_limit, "--start-limit"))
    rows = api.describe_levers(script, terms)
    if as_json:
        print(json.dumps({row.name: row.as_json() for row in rows}))
    else:
        print_levers(rows, typed=script.typed if script else "SCRIPT")
