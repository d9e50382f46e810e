"""How near does a run that finds its levers itself come to one under the plan that `tune` made, and what does it lose?

    python benchmarks/learned.py [lenet] [char_gpt] [--pairs 2] [--seconds 150]

`tune` runs once. Then whole runs of as many steps alternate: `flatout run` under its plan, and `flatout run --learn` in
an empty folder. Steps a second are those of the last third of each run's steps, without evaluation, as its trace has
them; what is lost is the difference of whole wall times. A run has so many steps that the learning one takes about
`--seconds`. The interval is over blocks of the last thirds, paired by their place: blocks of one run are not
independent of each other, so what differs between runs is in it only as far as the pairs show it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from flatout.records import trace_file
from flatout.records.trace import Window
from measuring import FLATOUT, PYTHON, ROOT, SHARED, quiet, ratio, timed, write

EXAMPLES = ROOT / "examples"

#: script and arguments, the option that sets the length, steps of one unit, units of a run that tells how long it takes
CASES = {
    "lenet": (["lenet.py", "--data", str(SHARED / "MNIST")], "--epochs", 938, 1),
    "char_gpt": (["char_gpt.py", "--data", str(SHARED / "text" / "tinyshakespeare.txt")], "--steps", 1, 200),
}
NUM_BLOCKS = 6
WITHIN, MOST_LOST_S = 0.03, 30.0
"""What is claimed: the end speed is this near to that of the tuned run, and no more seconds are lost against it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments = parser.parse_args()
    for name in arguments.cases:
        measure(name, arguments.pairs, arguments.seconds)


def measure(name: str, pairs: int, seconds: float) -> None:
    words, option, _, short = CASES[name]
    script = [str(EXAMPLES / words[0]), *words[1:]]
    folder = Path(tempfile.mkdtemp(prefix=f"flatout-learned-{name}-"))
    try:
        quiet()
        plain = timed([PYTHON, *script, option, str(short)], folder)
        if plain.exit_code:
            raise SystemExit(plain.output)
        length = max(round(short * seconds / plain.wall_s), short)
        tune = timed([FLATOUT, "tune", "--json", *script, option, str(length)], folder / "tuned")
        verdict = json.loads(tune.output.splitlines()[-1]) if tune.exit_code == 0 else {"failed": tune.output}
        print(name, "tune:", json.dumps(verdict)[:300], f"{tune.wall_s:.0f} s", flush=True)
        runs: dict[str, list[dict[str, Any]]] = {"tuned": [], "learned": []}
        for number in range(pairs):
            for side in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                quiet(60)
                runs[side].append(one_run(side, [*script, option, str(length)], folder, number))
                print(name, side, {k: v for k, v in runs[side][-1].items() if k not in ("blocks_s", "summary")})
        found = compared(runs)
        print(name, json.dumps(found), flush=True)
        write(
            f"learned_{name}",
            {
                "script": " ".join([*script, option, str(length)]),
                "tune": verdict,
                "tune_wall_s": tune.wall_s,
                "runs": runs,
                **found,
            },
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def one_run(side: str, script: list[str], folder: Path, number: int) -> dict[str, Any]:
    """A whole run; one that learns begins where nothing lies."""
    place = folder / ("tuned" if side == "tuned" else f"learned{number}")
    words = ["run", "--json", "summary.json", *(["--learn"] if side == "learned" else [])]
    done = timed([FLATOUT, *words, *script], place)
    summary = json.loads((place / "summary.json").read_text())
    blocks = last_third(Path(summary["run"]) / "trace-run.jsonl")
    return {
        "wall_s": done.wall_s,
        "exit_code": done.exit_code,
        "foreign": done.foreign_fraction,
        "steps_per_s": len(blocks) / sum(blocks) if blocks else None,
        "learning_ended": None if side == "tuned" else summary["learned"] is not None,
        "levers": summary["levers"],
        "engaged": summary["engaged"],
        "said": [line for line in done.output.splitlines() if line.startswith("flatout")],
        "blocks_s": blocks,
        "summary": summary,
    }


def last_third(trace: Path) -> list[float]:
    """Seconds of a step, without evaluation, in each of some blocks of the last third of a run's steps."""
    windows = [record for record in trace_file.Reader(trace) if isinstance(record, Window)]
    steps = [s - o for w in windows for s, o in zip(w.step_s, w.outside_s, strict=True)]
    last = steps[-(len(steps) // 3) :]
    size = len(last) // NUM_BLOCKS
    return [statistics.fmean(last[n * size : (n + 1) * size]) for n in range(NUM_BLOCKS)] if size else []


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Speed of the learned runs over that of the tuned ones, and the seconds lost against them."""
    tuned, learned = ([block for run in runs[side] for block in run["blocks_s"]] for side in ("tuned", "learned"))
    lost_s = [a["wall_s"] - b["wall_s"] for a, b in zip(runs["learned"], runs["tuned"], strict=True)]
    speed = ratio(tuned, learned)  # seconds of a step under the plan over those of a run that has learned
    return {
        "end_speed": speed,
        "within": speed["ratio"] >= 1 - WITHIN,
        "lost_s": lost_s,
        "lost_little": max(lost_s) <= MOST_LOST_S,
        "all_ended": all(run["learning_ended"] for run in runs["learned"]),
    }


if __name__ == "__main__":
    main()
