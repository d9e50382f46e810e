"""`flatout machine`: parse, call, print."""

from __future__ import annotations

import json

import click

from flatout.cli import options
from flatout.errors import UsageError


@click.command("machine")
@click.option("--refresh", is_flag=True, help="Measure again, even where trusted ceilings are kept.")
@click.option(
    "--forget-priors",
    is_flag=True,
    help="Remove what earlier tunings found, by which later ones order what they try; nothing is measured.",
)
@click.option("--ranks", "num_ranks", type=int, metavar="N", help="Measure as well what N ranks exchange at most.")
@options.as_json
def command(refresh: bool, forget_priors: bool, num_ranks: int | None, as_json: bool) -> None:
    """This machine, and what it can do at most: matrix products, convolutions, memory, starting an operation; energy.

    \b
    Example:  flatout machine
    Next:     flatout why train.py
    """  # noqa: D301
    from flatout import api
    from flatout.machine.energy_counters import energy_counters
    from flatout.machine.exchange_ceilings import exchange_ceilings
    from flatout.records.as_json import to_json
    from flatout.report import print_forgotten, print_machine

    if forget_priors and refresh:
        raise UsageError(
            "either `--forget-priors` or `--refresh`",
            cause="the one removes what was found by tuning, the other measures the machine again",
            hint="one after the other",
        )
    if forget_priors:
        done = api.forget_priors()
        if as_json:
            print(json.dumps(to_json(done)))
        else:
            print_forgotten(done.num_tunings, done.folder)
        return
    kept = api.kept_priors()
    ceilings = api.machine(refresh=refresh)
    exchanges = exchange_ceilings(num_ranks) if num_ranks is not None else ()
    energy = energy_counters()
    if as_json:
        counters = {"counters": energy.counters, "missing": energy.missing}
        priors = {"num_tunings": kept.num_files, "folder": kept.folder and str(kept.folder)}
        told = {**to_json(ceilings), "energy": to_json(counters), "priors": priors}
        if num_ranks is not None:
            told["exchanges"] = {"num_ranks": num_ranks, "values": [to_json(one) for one in exchanges]}
        print(json.dumps(told))
    else:
        print_machine(ceilings, exchanges=exchanges, energy=energy, priors=(kept.num_files, str(kept.folder)))
