"""What does `flatout tune` find for training scripts that somebody else wrote? A row for each, unmodified.

    python benchmarks/public_scripts.py PATH/TO/pytorch-examples [mnist vae ...]

PATH is a checkout of https://github.com/pytorch/examples; the data that the scripts download should be there already.
`lenet` and `resnet_folder` are our own examples, with the data of the other benchmarks.
Writes `results/public_<script>_....json` with the whole result, and prints the rows of `docs/public-scripts.md`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from flatout.report.tried import share_won
from measuring import FLATOUT, ROOT, SHARED, quiet, timed, write

OWN = "flatout's examples"

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
    "lenet": (OWN, [], ["lenet.py", "--data", str(SHARED / "MNIST")]),
    "resnet_folder": (OWN, [], ["resnet_folder.py", "--data", str(SHARED / "imagenet-sample")]),
}  # fmt: skip

#: what a script needs to run at all with this PyTorch, also without flatout
ENVIRONMENT = {"time_sequence_prediction": {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flatout-benchmark-") as own:
        shutil.copytree(ROOT / "examples", own, dirs_exist_ok=True)
        for name in arguments.cases:
            folder, options, script = CASES[name]
            place = Path(own) if folder == OWN else arguments.examples.resolve() / folder
            measure(name, place, ["tune", "--json", "--no-priors", *options, *script])


def measure(name: str, place: Path, words: list[str]) -> None:
    """Tune a script in its folder; print its row, and write all that was found."""
    quiet()
    needed = ENVIRONMENT.get(name, {})
    tune = timed([FLATOUT, *words], place, needed)
    command = without_places(" ".join([*(f"{key}={value}" for key, value in needed.items()), "flatout", *words]), place)
    if tune.exit_code:
        print(f"| `{name}` | not measured: {tune.output.strip().splitlines()[-3:]} |", flush=True)
        write(f"public_{name}", {"command": command, "failed": without_places(tune.output, place)})
        return
    run = json.loads(tune.output.splitlines()[-1])["run"]
    verdict = json.loads(without_places(tune.output.splitlines()[-1], place))
    result = json.loads(without_places((place / run / "result.json").read_text(encoding="utf-8"), place))
    print(row(name, verdict, result), flush=True)
    write(f"public_{name}", {"command": command, "wall_s": tune.wall_s, "verdict": verdict, "result": result})


def without_places(text: str, place: Path) -> str:
    """Whose machine it was measured on is nobody's business."""
    return text.replace(str(place), ".").replace(str(place.parent), "..").replace(str(SHARED), "DATA")


def waiting(result: dict[str, Any]) -> str:
    """What data that are free would bring at most, what levers for the input alone brought, and that as a share."""
    bound = next((one for one in result["diagnosis"]["bounds"] if one["remedy"] == "free data"), None)
    found = result.get("input_trial")
    if bound is None or found is None or not found.get("ratio") or not bound.get("ratio") or bound["ratio"] <= 1:
        return ""
    won = share_won(found["ratio"], bound["ratio"])
    return f"{bound['ratio']:.2f}x; {'+'.join(found['levers'])} {found['ratio']:.2f}x; {won:.0%}"


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
        waiting(result),
        f"{verdict['tuning_s']:.0f}",
        f"`public_{name}`",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
