"""`flatout machine`: parse, call, print."""

from __future__ import annotations

import json

import click

from flatout.cli import options


@click.command("machine")
@click.option("--refresh", is_flag=True, help="Measure again, even where trusted ceilings are kept.")
@options.as_json
def command(refresh: bool, as_json: bool) -> None:
    """This machine, and what it can do at most: matrix products, convolutions, memory, starting an operation; energy.

    \b
    Example:  flatout machine
    Next:     flatout why train.py
    """  # noqa: D301
    from flatout import api
    from flatout.records import to_json
    from flatout.report import print_machine
    from flatout.run.energy_counters import energy_counters

    ceilings = api.machine(refresh=refresh)
    energy = energy_counters()
    if as_json:
        counters = {"counters": energy.counters, "missing": energy.missing}
        print(json.dumps({**to_json(ceilings), "energy": to_json(counters)}))
    else:
        print_machine(ceilings, energy=energy)
