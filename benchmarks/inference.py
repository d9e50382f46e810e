"""What does `flatout tune` find for scripts that infer, beside every runtime that is installed?

    python benchmarks/inference.py [--only lenet:1 ...] [--rounds 4]

Four models at batch 1 and 32 (`scripts/infers.py`): `flatout tune` at its defaults, then rounds of whole processes in
an order drawn for each: plain `python`, `flatout run` under what was found, and `flatout run --levers RUNTIME --fixed`
for each runtime of class rounding. A side's speed is that between two of the script's own progress lines, the first of
them when it has settled. Writes `results/inference_MODEL_BATCH_....json` after each round.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from measuring import FLATOUT, PYTHON, quiet, ratio, timed, write

SCRIPT = Path(__file__).parent / "scripts" / "infers.py"
CASES = [f"{model}:{batch}" for model in ("lenet", "resnet18", "encoder", "lstm") for batch in (1, 32)]
RUNTIMES = ("onnxruntime", "openvino")
SETTLE_S, RUNTIME_S, RUN_S, TIMED_S = 3.0, 12.0, 24.0, 8.0
"""After the start of calls, of plain, of a runtime (an export), of a run (its check). Then this is timed."""

LINE = re.compile(r"^(\d+) calls at ([\d.]+) s$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    for case in arguments.only:
        with tempfile.TemporaryDirectory(prefix="flatout-") as place:
            measure(case, Path(place), arguments.rounds)


def measure(case: str, place: Path, rounds: int) -> None:
    """One model and batch."""
    model, batch = case.split(":")
    words = [str(SCRIPT), model, "--batch", batch]
    quiet()
    done = timed([FLATOUT, "tune", "--json", *words], place)
    tune: dict[str, Any] = {"wall_s": done.wall_s, "exit_code": done.exit_code, "output": done.output[-2000:]}
    if not done.exit_code:
        tune["verdict"] = json.loads(done.output.splitlines()[-1])
    print(f"{case}: tune {done.wall_s:.0f} s, {tune.get('verdict', {}).get('levers')}", flush=True)
    settles_s = {"plain": SETTLE_S, "flatout": RUN_S, **dict.fromkeys(RUNTIMES, RUNTIME_S)}
    starts = {"plain": [PYTHON], "flatout": [FLATOUT, "run"]}
    starts |= {one: [FLATOUT, "run", "--levers", one, "--fixed"] for one in RUNTIMES}
    sides = {side: [*start, *words, "--seconds", str(settles_s[side] + TIMED_S)] for side, start in starts.items()}
    samples: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in random.sample(list(sides), len(sides)):
            quiet(30)
            samples[side].append(sample(sides[side], place, settles_s[side]))
            print(case, side, samples[side][-1].get("call_s"), flush=True)
        found = {side: [one.get("call_s") for one in rows] for side, rows in samples.items()}
        over = {
            side: ratio(found["plain"], found[side])
            for side in sides
            if side != "plain" and None not in (*found["plain"], *found[side])
        }
        name = f"inference_{model}_{batch}"
        write(name, {"tune": tune, "commands": sides, "samples": samples, "over_plain": over})


def sample(command: list[str], place: Path, settle_s: float) -> dict[str, Any]:
    """Seconds a call in one process, between the first line after `settle_s` and the last."""
    done = timed(command, place)
    lines = [(int(num), float(at)) for num, at in LINE.findall(done.output)]
    late = [one for one in lines if one[1] >= settle_s]
    speed = {"call_s": (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])} if len(late) > 1 else {}
    return {**speed, "foreign": done.foreign_fraction, "exit_code": done.exit_code}


if __name__ == "__main__":
    main()
