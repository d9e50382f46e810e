"""What does every set of a script's levers bring? One whole grid a script, recorded once, for searches to be played on.

    python benchmarks/search/record.py lenet char_gpt ... [--pairs 6]

Each set of step levers that may stand together (at least 64 of them where the script has so many) is measured beside
plain as `tune` measures a candidate, in an order drawn by lot, each with the same number of pairs; numbers are compared
for every set that is faster. What the search sees of a script (facts, anatomy, diagnosis) is written down with it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "claims"))

from itself import SCRIPTS

from flatout import agreement, search
from flatout.looks import Looks
from flatout.plan import Candidate
from flatout.records import to_json
from flatout.run.machine import read_machine
from flatout.run.script import Script
from flatout.trace import Levers
from flatout.trials import pairs
from flatout.trials.bench import opened
from flatout.trials.conduct import Conduct, Goal, Show
from flatout.trials.ends import CandidateFailed
from flatout.trials.pairs import Extent
from measuring import write

MOST = 128
"""So many sets are measured at most: all small ones, then larger ones by lot."""

FEWEST_LEVERS = 6


def sets_of(space: search.Space, lots: random.Random) -> list[Levers]:
    """Sets of levers that may stand together, one setting of each; all of up to two levers, then by lot."""
    options: dict[str, list[Any]] = {}
    for single in space.singles:
        ((name, settings),) = single.levers.items()
        options.setdefault(name, []).append(settings)
    everything: list[Levers] = []
    for num in range(1, len(options) + 1):
        for names in itertools.combinations(options, num):
            for chosen in itertools.product(*(options[name] for name in names)):
                levers = dict(zip(names, chosen, strict=True))
                if not any(other in space.levers[name].conflicts for name in levers for other in levers):
                    everything.append(levers)
    small = [levers for levers in everything if len(levers) <= 2]
    large = [levers for levers in everything if len(levers) > 2]
    lots.shuffle(large)
    return (small + large)[:MOST]


def record(name: str, num_pairs: int) -> dict[str, Any]:
    """The grid of one script."""
    path, *arguments = SCRIPTS[name]
    lots = random.Random(name)
    with tempfile.TemporaryDirectory() as folder:
        goal = Goal(budget_s=3600.0)
        conduct = Conduct(Script(path=path, arguments=tuple(arguments)), Path(folder), read_machine(), goal, Show())
        with opened(conduct.bench):
            conduct.observe()
            plain, facts = conduct.plain, conduct.bench.facts
            assert facts is not None and plain.anatomy is not None and plain.diagnosis is not None
            toggled = {n: lever for n, lever in conduct.levers.items() if lever.toggles == "step"}
            found = (plain.anatomy, plain.diagnosis)
            space = search.space_of(toggled, facts, conduct.machine, found, search.Choice())
            sets = sets_of(space, lots)
            lots.shuffle(sets)
            rows = []
            for number, levers in enumerate(sets):
                rows.append(_row(conduct, levers, num_pairs))
                print(
                    f"{name} {number + 1}/{len(sets)} {Candidate(levers=levers).label} {rows[-1]['outcome']}",
                    flush=True,
                )
            return {
                "script": name,
                "arguments": [Path(word).name if "/" in word else word for word in (path, *arguments)],
                "facts": to_json(facts),
                "anatomy": to_json(plain.anatomy),
                "diagnosis": to_json(plain.diagnosis),
                "machine": to_json(conduct.machine),
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
            class_ = search.widest_class(levers, conduct.levers)
            judgement: agreement.Judgement = conduct._judge(levers, class_)
            row |= {"agreement": judgement.verdict, "judging_s": time.perf_counter() - judging_s}
    except CandidateFailed as failed:
        row |= {"outcome": "failed", "reason": str(failed)[:200], "took_s": time.perf_counter() - begun_s}
    return row


def main() -> None:
    """Record the grids that were named, each into a file of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", choices=sorted(SCRIPTS))
    parser.add_argument("--pairs", type=int, default=6)
    wanted = parser.parse_args()
    for name in wanted.scripts:
        write(f"search_grid_{name}", record(name, wanted.pairs))


if __name__ == "__main__":
    main()
