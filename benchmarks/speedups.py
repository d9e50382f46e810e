"""How much faster is a script under `flatout run` than plain, and than with an expert's edit? Twelve scripts.

    python benchmarks/speedups.py --examples PATH/TO/pytorch-examples [--only NAME ...] [--rounds 4] [--onto]

For each script of `speedup_cases.py`: `flatout tune` at its defaults, then rounds of whole processes, plain, the
expert's (`experts/`) and `flatout run`, in an order drawn for each round. A side's speed is that of one window between
two of the script's own progress lines (`stamped.py`), which begins when start-up is over, compilation included; for
`flatout run` that is when its check of the plan is. What start-up costs shows in a short run, which is timed from the
start of its process. `--onto` skips scripts that have a result of this month, so that a sitting can be cut short.

Writes `results/script_NAME_....json` after each round, then the tables of `benchmarks/public-scripts.md`. An hour and a
quarter on two cores. Needs `benchmarks/requirements.txt`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from flatout.records.trace import FOREIGN_LIMIT
from flatout.run.controller import CHECK_PAIRS, REST_WINDOWS
from flatout.run.run_windows import WINDOW_S
from measuring import FLATOUT, RESULTS, file_for, quiet, ratio, timed, write
from sides import SIDES, Edit, Side, edit_for, environment, prepared, typed, variant
from speedup_cases import ALL, CASES, Case
from speedups_page import into, summary
from stamped import Stamped, Stretch, stamped

SETTLE_S = 3.0
"""After the first progress line: allocators, caches, second compilations."""

CHECK_FACTOR = 1.2
"""What a check takes beyond its windows: steps after each change that are not measured."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=Path, help="a checkout of pytorch/examples; without it, ours alone")
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--onto", action="store_true", help="go on where an earlier sitting ended")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the script that is being timed is ended too
    for name in arguments.only or [
        case.name for case in ALL if case.counted and (arguments.examples or not case.folder)
    ]:
        if arguments.onto and is_done(name, arguments.rounds):
            print(f"{name}: has a result", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix=f"flatout-{name}-") as place:
            measure(CASES[name], arguments.examples, Path(place), arguments.rounds)
    print(summary(RESULTS))
    into(RESULTS)


def is_done(name: str, rounds: int) -> bool:
    """Whether this machine has all rounds of a script; one of which no ratio came is tried again."""
    path = file_for(f"script_{name}")
    if not path.exists():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["rounds"] >= rounds and found["over_plain"]["ratio"] is not None


def measure(case: Case, examples: Path | None, place: Path, rounds: int) -> None:
    """Tune one script, then compare its sides."""
    sides, env = prepared(case, examples, place), environment(case)
    edit = edit_for(case.name, variant())
    tune = tuned(case, sides["flatout"].folder, env)
    print(f"{case.name}: tune {tune['wall_s']:.0f} s, {tune['levers'] or tune['failed'] or 'no levers'}", flush=True)
    samples: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in random.sample(SIDES, len(SIDES)):
            quiet(60)
            settle_s = checked_s(tune) if side == "flatout" else SETTLE_S
            found = run(case, sides[side], env, settle_s)
            samples[side].append(sample(number, found, place))
            said = found.failed or f"{1 / found.unit_s:.2f} {case.unit}/s"
            print(f"{case.name} {side}: {said}, foreign {found.foreign_fraction or 0:.0%}", flush=True)
            if found.failed:
                print(found.output, found.said, sep="\n", flush=True)
        value = {"rounds": number + 1, "unit": case.unit, "commands": commands(case, sides), "tune": tune}
        write(f"script_{case.name}", {**value, "expert": described(edit), "samples": samples, **compared(samples)})


def tuned(case: Case, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """What `flatout tune` says at its defaults, and how long it took; a refusal is a result too."""
    quiet()
    done = timed([FLATOUT, "tune", "--json", *case.words], folder, env)
    found: dict[str, Any] = {"wall_s": done.wall_s, "exit_code": done.exit_code, "levers": [], "failed": ""}
    if done.exit_code:
        return {**found, "failed": without_places("\n".join(done.output.strip().splitlines()[-4:]), folder.parent)}
    verdict = json.loads(done.output.splitlines()[-1])
    result = json.loads((folder / verdict["run"] / "result.json").read_text(encoding="utf-8"))
    kept = json.loads(without_places(json.dumps({"verdict": verdict, "result": result}), folder.parent))
    return {**found, "levers": verdict["levers"], **kept}


def checked_s(tune: dict[str, Any]) -> float:
    """So long a run is not timed at first: until its plan has been checked in windows beside plain ones."""
    if not tune["levers"]:
        return SETTLE_S
    window_s = max(WINDOW_S, 1 / tune["verdict"]["tuned_steps_per_s"])
    return SETTLE_S + CHECK_FACTOR * CHECK_PAIRS * (2 + REST_WINDOWS) * window_s


def run(case: Case, side: Side, env: dict[str, str], settle_s: float) -> Stamped:
    """One process of one side."""
    stretch = Stretch(line=case.line, work_per_line=case.work_per_line, work=case.work, settle_s=settle_s)
    return stamped(side.command, side.folder, env, stretch)


def sample(number: int, found: Stamped, place: Path) -> dict[str, Any]:
    """What is kept of a process."""
    names = ("first_s", "begin_s", "end_s", "short_s", "work", "foreign_fraction", "failed")
    said = {"said": without_places(found.said, place), "output": without_places(found.output, place)}
    speed = {} if found.failed else {"unit_s": found.unit_s}
    return {"round": number, **{name: getattr(found, name) for name in names}, **speed, **said}


def undisturbed(one: dict[str, Any]) -> bool:
    """Whether other processes left the machine alone while a process was timed."""
    return (one.get("foreign_fraction") or 0.0) <= FOREIGN_LIMIT


def compared(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The ratios, over rounds in which both sides have a number."""

    def over(baseline: str, measure: str) -> dict[str, Any]:
        both = [pair for pair in zip(samples[baseline], samples["flatout"], strict=True) if all(map(undisturbed, pair))]
        pairs = [(one[measure], other[measure]) for one, other in both if one.get(measure) and other.get(measure)]
        return ratio([one for one, _ in pairs], [other for _, other in pairs])

    return {
        "over_plain": over("plain", "unit_s"),
        "over_expert": over("expert", "unit_s"),
        "short_over_plain": over("plain", "short_s"),
        "short_over_expert": over("expert", "short_s"),
    }


def commands(case: Case, sides: dict[str, Side]) -> dict[str, str]:
    """What was typed."""
    needed = dict(case.environment)
    typed_by = {side: typed(made.command, needed) for side, made in sides.items()}
    return {"tune": typed(("flatout", "tune", *case.words), needed), **typed_by}


def described(edit: Edit) -> dict[str, Any]:
    """The expert's edit, by name."""
    return {"edit": edit.source, "options": " ".join(edit.options), "num_lines": edit.num_lines}


def without_places(text: str, place: Path) -> str:
    """Where things lay on one machine is nobody's business."""
    return text.replace(str(place.resolve()), "..").replace(str(place), "..")


if __name__ == "__main__":
    main()
