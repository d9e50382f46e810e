"""What do ranks cost, and how near is what they train to one process? On ranks of this machine.

    python benchmarks/many_ranks.py [--rounds 5] [--only agreement step memory start] [--modes replicate shard tensor]

`agreement`: parameters after 200 steps against one process, beside a control of one process that sums each batch in as
many parts as there are ranks, in a training that does not enlarge rounding (`--smooth`) and on random targets. `step`:
the step's time under `flatout run --ranks 2` against the same training written by hand with DistributedDataParallel,
`fully_shard` or `parallelize_module` under torchrun, in turn (*pipeline* against one process alone). `memory`: the most
that rank 0 of four held of a model of 100 M parameters, sharded, against `fully_shard` by hand and one process, and in
the modes that divide the model. `start`: wall time of a script that trains three steps on two and on four ranks, beyond
torchrun's. The share of the running comparison is counted inside our code. Writes `results/ranks_SECTION_....json`.
"""

from __future__ import annotations

import argparse
import itertools
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
MODES = ("replicate", "shard", "tensor", "pipeline")
NOT_BY_HAND = (
    ("tensor", "convolutions"),
    ("pipeline", "mlp"),
    ("pipeline", "convolutions"),
    ("pipeline", "transformer"),
)
"""What no script by hand is written for: `parallelize_module` has no style for convolutions; a pipeline's schedule owns
the loss, and is another script."""

MODELS = ("mlp", "convolutions", "transformer")
WARM = 20
"""First steps, which are not counted."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def by_hand(num: int, mode: str, *words: str) -> list[str]:
    """What an expert types."""
    launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
    return [*launcher, SCRIPT, *words, "--by-hand", mode]


def ours(num: int, mode: str, *words: str, options: tuple[str, ...] = ("-q",)) -> list[str]:
    """What a user of flatout types."""
    return [FLATOUT, "run", *options, "--ranks", str(num), "--mode", mode, SCRIPT, *words]


def distance(one: Path, other: Path) -> float:
    """Relative distance of all parameters: norm of the difference over the norm."""
    a, b = torch.load(one), torch.load(other)
    off = sum(float((a[name] - b[name]).double().norm() ** 2) for name in b)
    return float((off / sum(float(b[name].double().norm() ** 2) for name in b)) ** 0.5)


def agreement(place: Path, modes: list[str]) -> list[dict[str, Any]]:
    """Each model and optimizer: ranks and control against one process."""
    cases = itertools.product(("smooth", "random"), MODELS, ("sgd", "adamw"))
    return [_agreement_of(kind, model, optimizer, place, modes) for kind, model, optimizer in cases]


def _agreement_of(kind: str, model: str, optimizer: str, place: Path, modes: list[str]) -> dict[str, Any]:
    words = [model, optimizer, "--steps", "200", *(["--smooth"] if kind == "smooth" else [])]
    runs = {"alone": [PYTHON, SCRIPT, *words], "control": [PYTHON, SCRIPT, *words, "--parts", "2"]}
    runs |= {mode: ours(2, mode, *words) for mode in modes}
    files = {name: place / f"{kind}-{model}-{optimizer}-{name}.pt" for name in runs}
    for name, command in runs.items():
        done = timed([*command, "--save", str(files[name])], place, ENVIRONMENT)
        assert not done.exit_code, done.output[-2000:]
    row: dict[str, Any] = {"training": kind, "model": model, "optimizer": optimizer, "steps": 200}
    row |= {name: distance(files[name], files["alone"]) for name in runs if name != "alone"}
    print(row, flush=True)
    return row


def step(place: Path, rounds: int, modes: list[str]) -> list[dict[str, Any]]:
    """Step times, in turn: medians of whole runs are the samples."""
    pairs = [(mode, model) for mode in modes for model in MODELS]
    return [_steps_of(model, mode, place, rounds) for mode, model in pairs]


def _steps_of(model: str, mode: str, place: Path, rounds: int) -> dict[str, Any]:
    sides = {
        "ranks": ours(2, mode, model, "sgd", "--times", options=("--json", "summary.json")),
        "alone": [PYTHON, SCRIPT, model, "sgd", "--times"],
    }
    if (mode, model) not in NOT_BY_HAND:
        sides["by_hand"] = by_hand(2, mode, model, "sgd", "--times")
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
        "model": model, "mode": mode, "step_s": samples,
        "exchanges": shares,
    }  # fmt: skip
    for other in [name for name in ("by_hand", "alone") if name in samples]:
        name = f"faster_than_{other}"
        found = row[name] = ratio(samples[other], samples["ranks"])
        print(f"{mode} {model}: {name} {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]", flush=True)
    print(f"{mode} {model}: comparisons {max(s['compared_share'] for s in shares):.2%} of the time", flush=True)
    return row


def memory(place: Path, rounds: int) -> dict[str, Any]:
    """The most that was resident in rank 0, bytes."""
    words = ["large", "adamw", "--steps", "6", "--memory"]
    sides = {
        "by_hand": by_hand(4, "shard", *words),
        "ranks": ours(4, "shard", *words),
        "tensor": ours(4, "tensor", *words),
        "pipeline": ours(4, "pipeline", *words),
        "alone": [PYTHON, SCRIPT, *words],
    }
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, command in sides.items():
            line = next(t for t in timed(command, place, ENVIRONMENT).output.splitlines() if t.startswith("memory "))
            samples[name].append(float(line.split()[1]))
    print({name: [round(value / 2**30, 2) for value in values] for name, values in samples.items()}, "GiB", flush=True)
    return samples


def start(place: Path, rounds: int) -> dict[str, Any]:
    """Wall time of a short run, in turn."""
    words, found = ["mlp", "sgd", "--steps", "3"], {}
    for num in (2, 4):
        sides = {"torchrun": by_hand(num, "replicate", *words), "ranks": ours(num, "replicate", *words)}
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name in random.sample(list(sides), len(sides)):
                quiet(60)
                samples[name].append(timed(sides[name], place, ENVIRONMENT).wall_s)
        beyond = [b - a for a, b in zip(samples["torchrun"], samples["ranks"], strict=True)]
        told = f"{statistics.median(beyond):.2f} s beyond torchrun, {min(beyond):.2f} to {max(beyond):.2f}"
        print(f"start of {num} ranks: {told}", flush=True)
        found[str(num)] = {"wall_s": samples, "beyond_s": beyond}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["agreement", "step", "memory", "start"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    arguments = parser.parse_args()
    rounds, modes = arguments.rounds, arguments.modes
    with tempfile.TemporaryDirectory(prefix="flatout-ranks-") as folder:
        place = Path(folder)
        sections = {
            "agreement": lambda: agreement(place, modes), "step": lambda: step(place, rounds, modes),
            "memory": lambda: memory(place, min(rounds, 3)), "start": lambda: start(place, rounds),
        }  # fmt: skip
        of_modes = "" if modes == list(MODES) else "_" + "_".join(modes).replace("+", "_")
        for name in arguments.only:
            print(
                write(
                    f"ranks_{name}{of_modes if name in ('agreement', 'step') else ''}",
                    {"command": sys.argv, "rounds": rounds, name: sections[name]()},
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
