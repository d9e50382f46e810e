"""What does every set of a script's levers bring? One whole grid a script, recorded once, for searches to be played on.

    python benchmarks/search/record.py lenet char_gpt mnist ... [--pairs 5] [--public CHECKOUT]

Every set of so many levers that it makes 64 is measured beside plain as `tune` measures a candidate, in an order drawn
by lot, each with the same number of pairs; numbers are compared for every set that is faster. Levers that need a new
process are not in it. What the search sees of a script (facts, anatomy, diagnosis) is written down with it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "claims"))

from itself import SCRIPTS

from flatout.looks import Looks
from flatout.plan import Candidate
from flatout.records import to_json
from flatout.run.machine import read_machine
from flatout.run.script import Script
from flatout.space import Choice, Space, space_of, widest_class
from flatout.trace import Levers
from flatout.trials import pairs
from flatout.trials.bench import opened
from flatout.trials.conduct import Conduct, Goal, Show
from flatout.trials.ends import CandidateFailed
from flatout.trials.pairs import Extent
from measuring import quiet, write

MANY = 64
"""A grid has at least so many sets, where the script has levers for them."""


def wanted_by(script: str, public: Path | None) -> Script:
    """A script of ours, or of a checkout of pytorch/examples with its data."""
    if script in SCRIPTS:
        path, *arguments = SCRIPTS[script]
        return Script(path=path, arguments=tuple(arguments))
    if public is None:
        raise SystemExit(f"`{script}` is one of pytorch/examples: `--public CHECKOUT` says where they are")
    os.chdir(public / script)
    return Script(path="main.py", arguments=("--epochs", "1"))


def sets_of(space: Space) -> list[Levers]:
    """All sets of as many levers as make a grid of `MANY`: the most promising first, and one that compiles.

    Every set of these levers that may stand together is in the grid, so that its best is the best there is of them.
    """
    first: dict[str, list[Any]] = {}
    for single in space.singles:
        ((name, settings),) = single.levers.items()
        first.setdefault(name, []).append(settings)
    names = sorted(first, key=lambda name: not space.levers[name].compiles)
    words = {name: first[name][:1] if space.levers[name].compiles else first[name] for name in names}
    chosen: dict[str, list[Any]] = {}
    for name in names:
        chosen[name] = words[name]
        if len(together := _compatible(chosen, space)) >= MANY:
            return together
    for name in names:  # fewer levers than that: then all that those which compile may be told
        chosen[name] = first[name]
    return _compatible(chosen, space)


def _compatible(options: dict[str, list[Any]], space: Space) -> list[Levers]:
    sets = []
    for settings in itertools.product(*([None, *found] for found in options.values())):
        levers = {name: one for name, one in zip(options, settings, strict=True) if one is not None}
        if levers and not any(other in space.levers[name].conflicts for name in levers for other in levers):
            sets.append(levers)
    return sets


def space_without_bounds(conduct: Conduct) -> Space:
    """What may be tried here without a new process; what the diagnosis rules out is in the grid as well."""
    plain, facts = conduct.plain, conduct.bench.facts
    assert facts is not None and plain.anatomy is not None and plain.diagnosis is not None
    toggled = {name: lever for name, lever in conduct.levers.items() if lever.toggles != "process"}
    named = tuple(name for name, lever in toggled.items() if not lever.only_by_name)
    found = (plain.anatomy, plain.diagnosis)
    return space_of(toggled, facts, conduct.machine, found, Choice(only=named))


def record(name: str, script: Script, num_pairs: int) -> dict[str, Any]:
    """The grid of one script."""
    lots = random.Random(name)
    with tempfile.TemporaryDirectory() as folder:
        conduct = Conduct(script, Path(folder), read_machine(), Goal(budget_s=7200.0), Show())
        with opened(conduct.bench):
            conduct.observe()
            sets = sets_of(space_without_bounds(conduct))
            lots.shuffle(sets)
            rows = []
            for number, levers in enumerate(sets):
                rows.append(_row(conduct, levers, num_pairs))
                told = f"{Candidate(levers=levers).label} {rows[-1]['outcome']} {rows[-1]['took_s']:.1f} s"
                print(f"{name} {number + 1}/{len(sets)} {told}", flush=True)
            return {
                "script": name,
                "arguments": [Path(word).name if "/" in word else word for word in script.arguments],
                "facts": to_json(conduct.bench.facts),
                "anatomy": to_json(conduct.plain.anatomy),
                "diagnosis": to_json(conduct.plain.diagnosis),
                "noise": conduct.bench.noise,
                "rows": rows,
            }


def _row(conduct: Conduct, levers: Levers, num_pairs: int) -> dict[str, Any]:
    begun_s = time.perf_counter()
    extent = Extent(looks=Looks.once(num_pairs), enough="all", purpose="grid", deadline_s=begun_s + 600)
    row: dict[str, Any] = {"levers": {n: dict(s) for n, s in levers.items()}, "outcome": "measured"}
    try:
        measured = pairs.measure(conduct.bench, levers, extent)
        row |= {
            "baseline_step_s": measured.baseline_s,
            "candidate_step_s": measured.candidate_s,
            "engage_s": measured.engage_s,
            "num_discarded": measured.num_discarded,
            "took_s": time.perf_counter() - begun_s,
            "missing": measured.missing,
        }
        if measured.baseline_s and sum(measured.baseline_s) > sum(measured.candidate_s):
            judging_s = time.perf_counter()
            judgement = conduct.judge(levers, widest_class(levers, conduct.levers))
            row |= {"agreement": judgement.verdict, "judging_s": time.perf_counter() - judging_s}
    except CandidateFailed as failed:
        row |= {"outcome": "failed", "reason": str(failed)[:200], "took_s": time.perf_counter() - begun_s}
    return row


def main() -> None:
    """Record the grids that were named, each into a file of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", help=f"{', '.join(SCRIPTS)}, or a folder of pytorch/examples")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--public", type=Path, help="a checkout of pytorch/examples, with its data")
    wanted = parser.parse_args()
    public = wanted.public.resolve() if wanted.public else None
    for name in wanted.scripts:
        quiet()
        write(f"search_grid_{name}", record(name, wanted_by(name, public), wanted.pairs))


if __name__ == "__main__":
    main()
