"""What does every set of a script's levers bring? One whole grid a script, recorded once, for searches to be played on.

    python benchmarks/search/record.py lenet char_gpt mnist ... [--pairs 5] [--public CHECKOUT] [--onto] [--tell]

Every set of so many levers that it makes 64 is measured beside plain as `tune` measures a candidate, each with the same
number of pairs; numbers are compared for every set that is faster. Levers that need a new process are not in it. What
the search sees of a script (facts, anatomy, diagnosis) is written down with it.

The order is drawn by lot, in blocks of sets that run the same compiled graphs: a block's first set compiles, as in
`tune`, and the others find it done; a child of its own for each, since PyTorch compiles a call only so many times
before it leaves further ones plain. Each script's grid is written as soon as it is whole; `--onto` skips scripts that
have one of this month, `--tell` only says how many sets there are and how long they take. Needs
`benchmarks/requirements.txt`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "claims"))

from itself import SCRIPTS

from flatout.errors import FlatoutError
from flatout.frameworks.lever import Lever
from flatout.judge.anatomy import dissect
from flatout.judge.paired import Extent
from flatout.judge.sequential import Looks
from flatout.machine.read import read_machine
from flatout.records.as_json import to_json
from flatout.records.plan import Candidate
from flatout.records.trace import Levers
from flatout.run.script import Script
from flatout.trials import windows
from flatout.trials.bench import WARM_UP_STEPS, Bench, opened
from flatout.trials.child_failures import CandidateFailed
from flatout.trials.conduct import Conduct
from flatout.trials.learn import UNKNOWN
from flatout.trials.search.space import Choice, Space, clash, space_of, widest_class
from flatout.trials.terms import Goal, Show, Terms
from measuring import file_for, quiet, write
from sides import copied, environment
from speedup_cases import ALL, CASES

MANY = 64
"""A grid has at least so many sets, where the script has levers for them."""

PUBLIC = tuple(case.name for case in ALL if case.folder)

COMPILING_S = 20.0
"""A guess of what compiling takes, for a guess of how long a grid takes."""


@contextlib.contextmanager
def script_named(name: str, public: Path | None, place: Path) -> Iterator[Script]:
    """A script of ours, or a copy of one of pytorch/examples', where it runs and with what it needs to."""
    if name in SCRIPTS:
        path, *arguments = SCRIPTS[name]
        yield Script(path=path, arguments=tuple(arguments))
        return
    case, former = CASES[name], dict(os.environ)
    folder = copied(case, public, place)
    os.environ.update(environment(case))
    try:
        with contextlib.chdir(folder):
            yield Script(path=case.words[0], arguments=case.words[1:])
    finally:
        os.environ.clear()
        os.environ.update(former)


def sets_of(space: Space, most: int) -> list[Levers]:
    """All sets of as many levers as make a grid of `MANY`: the most promising first, and one that compiles.

    Every set of these levers that may stand together is in the grid, so that its best is the best there is of them.
    Where a lever would make more than `most`, fewer of its settings are in it, and none where one is too many.
    """
    first: dict[str, list[Any]] = {}
    for single in space.singles:
        ((name, settings),) = single.levers.items()
        first.setdefault(name, []).append(settings)
    names = sorted(first, key=lambda name: not space.levers[name].compiles)
    chosen: dict[str, list[Any]] = {}
    for name in names:
        chosen = _with(chosen, name, first[name][: 1 if space.levers[name].compiles else None], (space, most))
        if len(together := _compatible(chosen, space)) >= MANY:
            return together
    for name in names:  # fewer levers than that: then all that those which compile may be told
        chosen = _with(chosen, name, first[name], (space, most))
    return _compatible(chosen, space)


def _with(chosen: dict[str, list[Any]], name: str, settings: list[Any], limits: tuple[Space, int]) -> dict[str, Any]:
    """The levers chosen so far and one more, with as many of its settings as there is room for."""
    space, most = limits
    options = ({**chosen, name: settings[:num]} for num in range(len(settings), 0, -1))
    return next((found for found in options if len(_compatible(found, space)) <= most), chosen)


def _compatible(options: dict[str, list[Any]], space: Space) -> list[Levers]:
    sets = []
    for settings in itertools.product(*([None, *found] for found in options.values())):
        levers = {name: one for name, one in zip(options, settings, strict=True) if one is not None}
        if levers and not clash(levers, space):
            sets.append(levers)
    return sets


def blocks_of(sets: Sequence[Levers], space: Space, lots: random.Random) -> list[list[Levers]]:
    """The sets in an order drawn by lot, those that run the same compiled graphs side by side; the rest is one block.

    What a graph depends on is taken to be every lever that shortens the forward or the backward pass.
    """
    blocks: dict[Any, list[Levers]] = {}
    for levers in lots.sample(sets, len(sets)):
        computing = {n: s for n, s in levers.items() if {"forward", "backward"} & {*space.levers[n].shortens}}
        blocks.setdefault(Candidate(levers=computing).key if compiles(levers, space.levers) else None, []).append(
            levers
        )
    return lots.sample([*blocks.values()], len(blocks))


def compiles(levers: Levers, known: Mapping[str, Lever]) -> bool:
    """Whether some lever of a set has the model compiled."""
    return any(known[name].compiles for name in levers)


def space_without_bounds(conduct: Conduct) -> Space:
    """What may be tried here without a new process; what the diagnosis rules out is in the grid as well."""
    plain, facts = conduct.plain, conduct.bench.facts
    assert facts is not None and plain.diagnosis is not None
    toggled = {name: lever for name, lever in conduct.levers.items() if lever.toggles != "process"}
    named = tuple(name for name, lever in toggled.items() if not lever.only_by_name)
    return space_of(toggled, facts, conduct.machine, plain.diagnosis, Choice(only=named))


def look(conduct: Conduct) -> None:
    """As little of the plain script as tells which levers it has, and in about which order."""
    conduct.bench.start()
    conduct.bench.settle()
    window = conduct.bench.window({}, purpose="anatomy", observe="phases")
    conduct.plain.anatomy, conduct.plain.diagnosis = dissect([window]), UNKNOWN


def guess_s(blocks: Sequence[Sequence[Levers]], space: Space, bench: Bench, num_pairs: int) -> float:
    """How long a grid takes, before anything of it is known: its windows as long as plain ones, and compiling."""
    size, found_s = bench.size, 0.0
    for block in blocks:
        for levers in block:
            loader = any(space.levers[name].toggles == "epoch" for name in levers)
            steps = size.num_steps + (size.loader_skip_steps if loader else size.skip_steps)
            found_s += 2 * num_pairs * steps * bench.step_guess_s
        found_s += COMPILING_S * compiles(block[0], space.levers)
    return found_s


def record(name: str, script: Script, wanted: argparse.Namespace) -> dict[str, Any] | None:
    """The grid of one script; none where only its size was asked for."""
    lots = random.Random(name)
    with tempfile.TemporaryDirectory() as folder:
        goal = Goal(budget_s=7200.0, terms=Terms(start_limit_s=600.0))  # some take long where the machine is busy
        conduct = Conduct(script, Path(folder), read_machine(), goal, Show())
        with opened(conduct.bench):
            look(conduct) if wanted.tell else conduct.observe()
            space = space_without_bounds(conduct)
            sets = sets_of(space, wanted.most_sets)
            blocks = blocks_of(sets, space, lots)
            about_s = guess_s(blocks, space, conduct.bench, wanted.pairs)
            levers = ", ".join(dict.fromkeys(one for levers in sets for one in levers))
            few = f", fewer than {MANY}" if len(sets) < MANY else ""
            long = f"{conduct.bench.size.num_steps} steps of {1000 * conduct.bench.step_guess_s:.3g} ms"
            print(
                f"{name}: {len(sets)} sets{few} of {levers}; windows of {long}, about {about_s / 60:.0f} min",
                flush=True,
            )
            if wanted.tell:
                return None
            return {
                "script": name,
                "arguments": [Path(word).name if "/" in word else word for word in script.arguments],
                "facts": to_json(conduct.bench.facts),
                "anatomy": to_json(conduct.plain.anatomy),
                "diagnosis": to_json(conduct.plain.diagnosis),
                "noise": conduct.bench.noise,
                "rows": list(_rows(conduct, blocks, wanted.pairs, told=name)),
            }


def _rows(conduct: Conduct, blocks: Sequence[Sequence[Levers]], num_pairs: int, told: str) -> Iterator[dict[str, Any]]:
    """Measure block by block, and tell how far it is."""
    num, number = sum(len(block) for block in blocks), 0
    compiled = [compiles(block[0], conduct.levers) for block in blocks]
    took_s: dict[bool, list[float]] = {True: [], False: []}
    for block, compiles_first in zip(blocks, compiled, strict=True):
        for index, levers in enumerate(block):
            begun_s = time.perf_counter()
            first = compiles_first and index == 0
            if first and number:
                _begin_anew(conduct.bench)
            row = _row(conduct, levers, num_pairs)
            number += 1
            took_s[first].append(time.perf_counter() - begun_s)
            said = f"{Candidate(levers=levers).label} {row['outcome']} {row['took_s']:.1f} s"
            left_min = left_s(took_s, num - number, sum(compiled)) / 60
            print(f"{told} {number}/{num} {said}, {left_min:.0f} min left", flush=True)
            yield row


def left_s(took_s: Mapping[bool, Sequence[float]], num_sets: int, num_compiled: int) -> float:
    """How long the rest of a grid takes.

    Args:
        took_s: Of the sets so far: by whether a set was the first to compile its graphs.
        num_sets: Sets that are left.
        num_compiled: First sets of graphs in the whole grid.
    """
    firsts, others = took_s[True], took_s[False]
    num_firsts = min(max(num_compiled - len(firsts), 0), num_sets)
    first_s = fmean(firsts) if firsts else COMPILING_S
    return num_firsts * first_s + (num_sets - num_firsts) * (fmean(others) if others else first_s)


def _begin_anew(bench: Bench) -> None:
    """Another child, as warm as the first was."""
    bench.start()
    bench.window({}, purpose="warm-up", num_steps=WARM_UP_STEPS)


def _row(conduct: Conduct, levers: Levers, num_pairs: int) -> dict[str, Any]:
    begun_s = time.perf_counter()
    extent = Extent(looks=Looks.alike(num_pairs), enough="all", deadline_s=begun_s + 600)
    row: dict[str, Any] = {"levers": {n: dict(s) for n, s in levers.items()}, "outcome": "measured"}
    try:
        measured = windows.measure(conduct.bench, levers, extent, purpose="grid")
        row |= {
            "baseline_step_s": measured.baseline_s,
            "candidate_step_s": measured.candidate_s,
            "engage_s": measured.engage_s,
            "num_discarded": measured.num_discarded,
            "took_s": time.perf_counter() - begun_s,
            "evidence": measured.evidence,
            "missing": measured.missing,
        }
        if not measured.baseline_s:
            row["outcome"] = "disturbed"  # others used the CPU, or each window compiled anew: nothing is known of it
        elif sum(measured.baseline_s) > sum(measured.candidate_s):
            judging_s = time.perf_counter()
            judgement = conduct.judge(levers, widest_class(levers, conduct.levers))
            row |= {"agreement": judgement.verdict, "judging_s": time.perf_counter() - judging_s}
    except CandidateFailed as failed:
        row |= {"outcome": "failed", "reason": str(failed)[:200], "took_s": time.perf_counter() - begun_s}
    return row


def is_recorded(name: str, num_pairs: int) -> bool:
    """Whether this machine has a grid of a script, of at least as many pairs."""
    path = file_for(f"search_grid_{name}")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return max((len(row.get("baseline_step_s", ())) for row in rows), default=0) >= num_pairs


def main() -> None:
    """Record the grids that were named, each into a file of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT", choices=[*SCRIPTS, *PUBLIC], help="%(choices)s")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--most-sets", type=int, default=128, help="measure no grid of more sets (%(default)s)")
    parser.add_argument("--public", type=Path, help="a checkout of pytorch/examples, with its data")
    parser.add_argument("--onto", action="store_true", help="go on where an earlier sitting ended")
    parser.add_argument("--tell", action="store_true", help="only say how many sets there are, and how long they take")
    wanted = parser.parse_args()
    for name in wanted.scripts:
        if wanted.onto and is_recorded(name, wanted.pairs):
            print(f"{name}: has a grid", flush=True)
            continue
        if not wanted.tell:
            quiet()
        try:
            with (
                tempfile.TemporaryDirectory(prefix=f"flatout-{name}-") as place,
                script_named(name, wanted.public, Path(place)) as script,
            ):
                grid = record(name, script, wanted)
        except FlatoutError as problem:  # of this script; the others are recorded even so
            print(f"{name}: {problem.error}: {problem.cause}", flush=True)
            continue
        if grid is None:
            continue
        write(f"search_grid_{name}", grid)
        num = sum(row["outcome"] == "disturbed" for row in grid["rows"])
        if num:
            print(f"{name}: of {num} sets no pair was undisturbed; a search takes them for failed", flush=True)


if __name__ == "__main__":
    main()
