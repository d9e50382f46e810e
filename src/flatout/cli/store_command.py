"""`flatout store`: parse, call, print."""

from __future__ import annotations

import json

import click

from flatout.cli import options
from flatout.errors import UsageError


@click.group("store")
def command() -> None:
    """Stores: items that `--keep-store` keeps on the disk between runs.

    \b
    Example:  flatout run --keep-store train.py --epochs 3
    Next:     flatout store ls
    """  # noqa: D301


@command.command("ls")
@options.as_json
def ls(as_json: bool) -> None:
    """Every store: its items, its size, when a run used it last, and in what state it is.

    \b
    Example:  flatout store ls
    Next:     flatout store rm NAME
    """  # noqa: D301
    from flatout import api
    from flatout.records.as_json import to_json
    from flatout.report import print_stores

    kept = api.stores()
    if as_json:
        print(json.dumps({one.name: {k: v for k, v in to_json(one).items() if k != "name"} for one in kept}))
    else:
        print_stores(kept)


@command.command("rm")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "every", is_flag=True, help="Remove every store.")
@click.option("--older-than", metavar="DAYS", help="With `--all`: only those that no run has used for so long.")
@options.as_json
def rm(names: tuple[str, ...], every: bool, older_than: str | None, as_json: bool) -> None:
    """Remove stores; one that a run uses stays. Nothing is asked: a later run makes what it needs.

    \b
    Example:  flatout store rm --all --older-than 30
    """  # noqa: D301
    from flatout import api
    from flatout.records.as_json import to_json
    from flatout.report import print_removed

    if bool(names) is every:
        raise UsageError(
            "name the stores, or `--all`" if not names else "either names or `--all`",
            cause="`rm` removes what is named",
            hint="`flatout store ls` lists them",
        )
    if older_than is not None and not every:
        raise UsageError(
            "`--older-than` stands without `--all`",
            cause="what is named is removed, however old it is",
            hint="`flatout store rm --all --older-than DAYS`",
        )
    days = None if older_than is None else options.days(older_than, "--older-than")
    done = api.remove_stores(None if every else names, older_than_days=days)
    if as_json:
        print(json.dumps(to_json(done)))
    else:
        print_removed(done)
