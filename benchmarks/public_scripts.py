"""What does `flatout tune` find for training scripts that somebody else wrote? A row for each, unmodified.

    python benchmarks/public_scripts.py PATH/TO/pytorch-examples [mnist vae ...]

PATH is a checkout of https://github.com/pytorch/examples; the data that the scripts download should be there already.
Writes `results/public_<script>_....json` with the whole result, and prints the rows of `docs/public-scripts.md`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measuring import FLATOUT, quiet, timed, write

#: folder, options of tune, script and its arguments
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "mnist": ("mnist", [], ["main.py", "--epochs", "1"]),
    "vae": ("vae", [], ["main.py", "--epochs", "1"]),
    "word_language_model": ("word_language_model", [], ["main.py", "--epochs", "1"]),
    "word_language_model_transformer": (
        "word_language_model",
        [],
        ["main.py", "--epochs", "1", "--model", "Transformer", "--use-optimizer", "--lr", "0.001"],
    ),
    "time_sequence_prediction": (
        "time_sequence_prediction",
        ["--start-limit", "10m", "--budget", "30m"],
        ["train.py", "--steps", "15"],
    ),
    "imagenet": (
        "imagenet",
        ["--budget", "5m"],
        ["main.py", "--arch", "resnet18", "--dummy", "--epochs", "1", "--batch-size", "32", "--no-accel"],
    ),
}  # fmt: skip

#: what a script needs to run at all with this PyTorch, also without flatout
ENVIRONMENT = {"time_sequence_prediction": {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    for name in arguments.cases:
        folder, options, script = CASES[name]
        quiet()
        needed = ENVIRONMENT.get(name, {})
        words = ["tune", "--json", *options, *script]
        tune = timed([FLATOUT, *words], arguments.examples.resolve() / folder, needed)
        command = " ".join([*(f"{key}={value}" for key, value in needed.items()), "flatout", *words])
        if tune.exit_code:
            print(f"| `{name}` | not measured: {tune.output.strip().splitlines()[-3:]} |", flush=True)
            write(f"public_{name}", {"command": command, "failed": tune.output})
            continue
        place = str(arguments.examples.resolve())  # whose machine it was measured on is nobody's business
        verdict = json.loads(tune.output.splitlines()[-1].replace(place, "."))
        stored = arguments.examples / verdict["run"] / "result.json"
        if not stored.exists():
            stored = arguments.examples / folder / verdict["run"] / "result.json"
        result = json.loads(stored.read_text(encoding="utf-8").replace(place, "."))
        print(row(name, verdict, result), flush=True)
        write(f"public_{name}", {"command": command, "wall_s": tune.wall_s, "verdict": verdict, "result": result})


def row(name: str, verdict: dict[str, Any], result: dict[str, Any]) -> str:
    """The script's line in the table."""
    winner = result.get("remeasured") or {}
    measured = f"{verdict['ratio']:.2f} [{verdict['ratio_low']:.2f}, {verdict['ratio_high']:.2f}]"
    cells = [
        f"`{name}`",
        f"{verdict['baseline_steps_per_s']:.3g}",
        f"{verdict['tuned_steps_per_s']:.3g}",
        measured if verdict["levers"] else verdict["verdict"],
        ", ".join(verdict["levers"]) or "none",
        winner.get("agreement_detail", "") if verdict["levers"] else "",
        f"{verdict['tuning_s']:.0f}",
        f"`public_{name}`",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
