"""`flatout levers`: parse, call, print."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path

import click

from flatout.cli import options
from flatout.errors import UsageError


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
    from flatout.report import levers, print_view
    from flatout.run.script import from_words

    if words and not module and not Path(words[0]).exists():
        _refuse_lever(words[0], {row.name for row in api.describe_levers()})
    script = from_words(words, module) if words or module else None
    terms = api.Terms(isolate=not allow_writes, start_limit_s=options.seconds(start_limit, "--start-limit"))
    rows = api.describe_levers(script, terms)
    if as_json:
        print(json.dumps({row.name: row.as_json() for row in rows}))
    else:
        print_view(levers.view(rows, script.typed if script else "SCRIPT"), verbose=True)


def _refuse_lever(word: str, names: Collection[str]) -> None:
    """Say so where a lever's name stands in the script's place.

    Raises:
        UsageError: It does.
    """
    if word in names:
        raise UsageError(
            f"`{word}` is a lever, and no script is called so",
            cause="`flatout levers` takes a script, and says of each lever whether it applies",
            hint="`flatout levers` without a script says what each lever does",
        )
