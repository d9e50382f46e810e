"""Is the anatomy right? Each phase against `torch.profiler` on the same script, steps of at least 20 ms.

    python benchmarks/claims/profiled.py [--rounds 3]

Both run by turns, each in its own process; compared are shares of the step, whose length the profiler itself changes.
The profiler sees a second or two of a machine whose neighbours come and go, so it runs up to three times a round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.judge import stats
from measuring import FLATOUT, PYTHON, ROOT, SHARED, quiet, timed, write

ORACLE = str(Path(__file__).parent / "profile_script.py")
EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "resnet_folder": [str(EXAMPLES / "resnet_folder.py"), "--data", str(SHARED / "imagenet-sample"), "--epochs", "9"],
    "char_gpt": [str(EXAMPLES / "char_gpt.py"), "--data", str(SHARED / "text" / "tinyshakespeare.txt")],
    "gan": [str(EXAMPLES / "gan.py"), "--epochs", "20"],
    "lenet_batch_512": [
        str(EXAMPLES / "lenet.py"),
        "--data",
        str(SHARED / "MNIST"),
        "--batch-size",
        "512",
        "--epochs",
        "9",
    ],
}
PHASES = ("data", "forward and loss", "backward", "optimizer")
"""Those that both can see; a script without a loader has no data phase."""

LIMIT = 0.05
"""Of the step, by which a phase may differ."""

ORACLES, ORACLES_S = 3, 60.0
"""The profiler runs so often in a round, or for about so long."""


def main() -> None:
    """Every script, so many rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.scripts:
        rounds = [one_round(SCRIPTS[name]) for _ in range(arguments.rounds)]
        row: dict[str, Any] = {"script": name, "rounds": rounds}
        for phase in PHASES:
            differences = [ours[phase] - oracle[phase] for ours, oracle in rounds if phase in oracle and phase in ours]
            row[phase] = stats.summarize(differences).median if differences else None
        row["agrees"] = all(abs(row[phase]) <= LIMIT for phase in PHASES if row[phase] is not None)
        row["unattributed"] = stats.summarize([ours["unattributed"] for ours, _ in rounds]).median
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "rounds"}), flush=True)
    if arguments.scripts == list(SCRIPTS):
        write("claims_profiled", {"command": " ".join(sys.argv), "limit": LIMIT, "rows": rows})


def one_round(words: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of the step: ours, and the oracle's."""
    with tempfile.TemporaryDirectory(prefix="flatout-profiled-") as folder:
        quiet(60)
        timed([FLATOUT, "why", "--json", "--budget", "40s", *words], Path(folder))
        found = json.loads(next(Path(folder).glob(".flatout/*/result.json")).read_text(encoding="utf-8"))["anatomy"]
        begin, oracles = time.monotonic(), [profiled(words, Path(folder))]
        while len(oracles) < ORACLES and time.monotonic() - begin < ORACLES_S:
            oracles.append(profiled(words, Path(folder)))
    phases = {name: seconds / found["step_s"] for name, seconds in found["phases_s"].items()}
    ours = {**phases, "forward and loss": phases.get("forward", 0.0) + phases.get("loss", 0.0)}
    oracle = {name: stats.summarize([one[name] for one in oracles]).median for name in oracles[0]}
    return {**ours, "step_ms": 1e3 * found["step_s"]}, oracle


def profiled(words: list[str], folder: Path) -> dict[str, float]:
    """What the profiler saw once."""
    quiet(60)
    out = folder / "oracle.json"
    out.unlink(missing_ok=True)
    done = timed([PYTHON, ORACLE, str(out), *words], folder)
    if not out.exists():
        raise SystemExit(f"the profiler saw nothing: {done.output[-500:]}")
    oracle = json.loads(out.read_text(encoding="utf-8"))
    step_s = oracle.pop("step")
    return {**{k: v / step_s for k, v in oracle.items() if k in PHASES}, "step_ms": 1e3 * step_s}


if __name__ == "__main__":
    main()
