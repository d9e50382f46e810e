"""What do ranks cost, and how near is what they train to one process? Replicate on two ranks of this machine.

    python benchmarks/many_ranks.py [--rounds 5] [--only agreement step start]

`agreement`: parameters after 200 steps against one process, beside a control of one process that sums each batch in as
many parts as there are ranks. `step`: the step's time under `flatout run --ranks 2` against the same training written
by hand with DistributedDataParallel under torchrun, in turn. `start`: wall time of a script that trains three steps,
beyond torchrun's. The share of the running comparison is counted inside our code. Writes `results/ranks_....json`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from measuring import FLATOUT, HERE, PYTHON, quiet, ratio, timed, write

SCRIPT = str(HERE / "scripts" / "ranked.py")
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
MODELS = ("mlp", "convolutions", "transformer")
WARM = 20
"""First steps, which are not counted."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def distance(one: Path, other: Path) -> float:
    """Relative distance of all parameters: norm of the difference over the norm."""
    a, b = torch.load(one), torch.load(other)
    off = sum(float((a[name] - b[name]).double().norm() ** 2) for name in b)
    return float((off / sum(float(b[name].double().norm() ** 2) for name in b)) ** 0.5)


def agreement(place: Path) -> list[dict[str, Any]]:
    """Each model and optimizer: ranks and control against one process."""
    rows = []
    for model in MODELS:
        for optimizer in ("sgd", "adamw"):
            words = [model, optimizer, "--steps", "200"]
            files = {name: place / f"{model}-{optimizer}-{name}.pt" for name in ("alone", "control", "two", "three")}
            runs = {
                "alone": [PYTHON, SCRIPT, *words],
                "control": [PYTHON, SCRIPT, *words, "--parts", "2"],
                "two": [FLATOUT, "run", "-q", "--ranks", "2", SCRIPT, *words],
                "three": [FLATOUT, "run", "-q", "--ranks", "3", SCRIPT, *words],
            }
            for name, command in runs.items():
                done = timed([*command, "--save", str(files[name])], place, ENVIRONMENT)
                assert not done.exit_code, done.output[-2000:]
            row = {"model": model, "optimizer": optimizer, "steps": 200}
            row |= {name: distance(files[name], files["alone"]) for name in ("control", "two", "three")}
            rows.append(row)
            print(row, flush=True)
    return rows


def step(place: Path, rounds: int) -> list[dict[str, Any]]:
    """Step times, in turn: medians of whole runs are the samples."""
    rows = []
    for model in MODELS:
        sides: dict[str, list[str]] = {
            "by_hand": [*TORCHRUN, model, "sgd", "--by-hand", "--times"],
            "ranks": [FLATOUT, "run", "--json", "summary.json", "--ranks", "2", SCRIPT, model, "sgd", "--times"],
            "alone": [PYTHON, SCRIPT, model, "sgd", "--times"],
        }
        samples: dict[str, list[float]] = {name: [] for name in sides}
        shares: list[dict[str, Any]] = []
        for _ in range(rounds):
            for name in random.sample(list(sides), len(sides)):
                quiet(60)
                done = timed(sides[name], place, ENVIRONMENT)
                line = next(text for text in done.output.splitlines() if text.startswith("times "))
                samples[name].append(statistics.median(float(s) for s in line.split()[1 + WARM :]))
            shares.append(json.loads((place / "summary.json").read_text())["exchanges"])
            (place / "summary.json").unlink()
        row = {
            "model": model, "step_s": samples, "over_by_hand": ratio(samples["by_hand"], samples["ranks"]),
            "over_alone": ratio(samples["alone"], samples["ranks"]), "exchanges": shares,
        }  # fmt: skip
        rows.append(row)
        compared = max(share["compared_share"] for share in shares)
        for name in ("over_by_hand", "over_alone"):
            found = row[name]
            print(f"{model}: {name} {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]", flush=True)
        print(f"{model}: comparisons {compared:.2%} of the time", flush=True)
    return rows


def start(place: Path, rounds: int) -> dict[str, Any]:
    """Wall time of a short run, in turn."""
    words = ["mlp", "sgd", "--steps", "3"]
    sides = {
        "torchrun": [*TORCHRUN, *words, "--by-hand"],
        "ranks": [FLATOUT, "run", "-q", "--ranks", "2", SCRIPT, *words],
    }
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in random.sample(list(sides), len(sides)):
            quiet(60)
            samples[name].append(timed(sides[name], place, ENVIRONMENT).wall_s)
    beyond = [b - a for a, b in zip(samples["torchrun"], samples["ranks"], strict=True)]
    print(
        f"start: {statistics.median(beyond):.2f} s beyond torchrun, {min(beyond):.2f} to {max(beyond):.2f}", flush=True
    )
    return {"wall_s": samples, "beyond_s": beyond}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["agreement", "step", "start"])
    arguments = parser.parse_args()
    found: dict[str, Any] = {"command": sys.argv, "rounds": arguments.rounds}
    with tempfile.TemporaryDirectory(prefix="flatout-ranks-") as folder:
        place = Path(folder)
        if "agreement" in arguments.only:
            found["agreement"] = agreement(place)
        if "step" in arguments.only:
            found["step"] = step(place, arguments.rounds)
        if "start" in arguments.only:
            found["start"] = start(place, arguments.rounds)
    print(write("ranks", found))


if __name__ == "__main__":
    main()
