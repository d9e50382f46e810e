"""How much faster is a script under the plan that `flatout tune` made, end to end, than under plain Python?

    python benchmarks/speedups.py [lenet] [char_gpt] [resnet_folder] [--pairs 6]

Steps a second are free of start-up: each side is run short and long, and the extra steps are divided by the extra
wall seconds. Plain and plan alternate, in whole processes, under `python` and `flatout run`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from measuring import FLATOUT, PYTHON, ROOT, SHARED, quiet, ratio, timed, write

EXAMPLES = ROOT / "examples"

#: script, arguments, the option that sets the length, its short and long value, steps of one unit
CASES = {
    "lenet": (["lenet.py", "--data", str(SHARED / "MNIST")], "--epochs", 1, 4, 938),
    "char_gpt": (
        ["char_gpt.py", "--data", str(SHARED / "text" / "tinyshakespeare.txt")],
        "--steps",
        100,
        240,  # before the evaluation at step 250
        1,
    ),
    "resnet_folder": (["resnet_folder.py", "--data", str(SHARED / "imagenet-sample")], "--epochs", 1, 6, 13),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--pairs", type=int, default=6)
    arguments = parser.parse_args()
    for name in arguments.cases:
        measure(name, arguments.pairs)


def measure(name: str, pairs: int) -> None:
    words, option, short, long, unit = CASES[name]
    script = [str(EXAMPLES / words[0]), *words[1:]]
    folder = Path(tempfile.mkdtemp(prefix=f"flatout-{name}-"))
    quiet()
    tune = timed([FLATOUT, "tune", "--json", *script, option, str(long)], folder)
    verdict = json.loads(tune.output.splitlines()[-1]) if tune.exit_code == 0 else {"failed": tune.output}
    print(name, "tune:", json.dumps(verdict), f"{tune.wall_s:.0f} s", flush=True)
    if not verdict.get("plan"):  # nothing to run under: the verdict is the result
        write(f"speedup_{name}", {"command": " ".join(script), "tune": verdict, "tune_wall_s": tune.wall_s})
        shutil.rmtree(folder, ignore_errors=True)
        return
    sides = {"plain": [PYTHON], "plan": [FLATOUT, "run"]}
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    steps_per_s: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(pairs):
        for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            quiet(60)
            runs = [timed([*sides[side], *script, option, str(n)], folder) for n in (short, long)]
            rate = unit * (long - short) / (runs[1].wall_s - runs[0].wall_s)
            steps_per_s[side].append(rate)
            foreign = max((r.foreign_fraction or 0.0) for r in runs)
            samples[side].append(
                {"short_s": runs[0].wall_s, "long_s": runs[1].wall_s, "steps_per_s": rate, "foreign": foreign}
            )
            print(
                f"{name} {side}: {rate:.2f} steps/s, foreign {foreign:.0%}; {runs[1].output.splitlines()[-1][:110]}",
                flush=True,
            )
    compared = ratio([1 / r for r in steps_per_s["plain"]], [1 / r for r in steps_per_s["plan"]])
    print(name, "ratio", compared["ratio"], [compared["low"], compared["high"]], flush=True)
    commands = {
        side: " ".join([*[Path(w).name for w in sides[side]], *script, option, f"{short}|{long}"]) for side in sides
    }
    write(
        f"speedup_{name}",
        {"commands": commands, "tune": verdict, "tune_wall_s": tune.wall_s, "samples": samples, "ratio": compared},
    )
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
