"""`flatout machine`: parse, call, print."""

from __future__ import annotations

import json

import click

from flatout.cli import options


@click.command("machine")
@click.option("--refresh", is_flag=True, help="Measure again, even where trusted ceilings are kept.")
@click.option("--ranks", "num_ranks", type=int, metavar="N", help="Measure as well what N ranks exchange at most.")
@options.as_json
def command(refresh: bool, num_ranks: int | None, as_json: bool) -> None:
    """This machine, and what it can do at most: matrix products, convolutions, memory, starting an operation; energy.

    \b
    Example:  flatout machine
    Next:     flatout why train.py
    """  # noqa: D301
    from flatout import api
    from flatout.frameworks import kind
    from flatout.machine.energy_counters import find
    from flatout.machine.exchange_ceilings import exchange_ceilings
    from flatout.records.as_json import to_json
    from flatout.report import machine as of_machine
    from flatout.report import print_view

    ceilings = api.machine(refresh=refresh)
    program = kind().package.exchange_calibration
    exchanges = exchange_ceilings(program, num_ranks) if num_ranks is not None and program is not None else ()
    energy = find()
    if as_json:
        counters = [{"name": one.name, "device": one.device, "source": one.source} for one in energy.counters]
        told = {**to_json(ceilings), "energy": {"counters": counters, "missing": list(energy.missing)}}
        if num_ranks is not None:
            told["exchanges"] = {"num_ranks": num_ranks, "values": [to_json(one) for one in exchanges]}
        print(json.dumps(told))
    else:
        print_view(of_machine.view(ceilings, exchanges=exchanges, energy=energy), verbose=True)
