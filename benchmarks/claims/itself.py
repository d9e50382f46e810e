"""How often does a real script come out as faster or slower than itself, on a real machine?

    python benchmarks/claims/itself.py quiet|busy [--comparisons 300] [--onto RESULT.json]

Each comparison is the final measurement as `tune` makes it, of plain against plain, with fresh windows of a running
script; the scripts take turns. `busy`: another process keeps one core busy by turns of half a minute (half a minute
on, half off), so that comparisons begin, end and lie in it. They are judged twice: as `tune` does, which leaves
disturbed windows out, and with all windows, as if nobody had looked at what others use. `--onto` goes on with what
an earlier sitting on the same kind of machine counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.frameworks.pytorch.levers import registry
from flatout.judge import stats
from flatout.judge.paired import Extent
from flatout.judge.sequential import Looks
from flatout.machine.read import read_machine
from flatout.records.trace import Window
from flatout.run.script import Script
from flatout.trials import conduct, windows
from flatout.trials.bench import Bench, opened
from flatout.trials.terms import Terms
from measuring import PYTHON, ROOT, SHARED, write

EXAMPLES = ROOT / "examples"
TESTED = ROOT / "tests" / "scripts"
MNIST = str(SHARED / "MNIST")
TEXT = str(SHARED / "text" / "tinyshakespeare.txt")

SCRIPTS: dict[str, list[str]] = {
    "lenet": [str(EXAMPLES / "lenet.py"), "--data", MNIST, "--epochs", "3"],
    "char_gpt": [str(EXAMPLES / "char_gpt.py"), "--data", TEXT, "--n-layer", "2", "--block-size", "64"],
    "tabular_mlp": [str(EXAMPLES / "tabular_mlp.py")],
    "gan": [str(EXAMPLES / "gan.py"), "--nf", "8", "--epochs", "20"],
    "resnet_folder": [str(EXAMPLES / "resnet_folder.py"), "--data", str(SHARED / "imagenet-sample"), "--epochs", "9"],
    "planted_layers": [str(TESTED / "planted.py"), "layers"],
    "planted_decode": [str(TESTED / "planted.py"), "decode"],
    "tiny": [str(TESTED / "tiny_training.py"), "--pause", "0.002"],
}

LOOKS = Looks.alike(conduct.FINAL_PAIRS, conduct.MOST_FINAL_PAIRS)


@dataclass
class EveryWindow:
    """The bench, with every window and what others used in it noted."""

    bench: Bench
    seen: list[Window] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bench, name)

    def window(self, *words: Any, **options: Any) -> Window:
        """One window."""
        found = self.bench.window(*words, **options)
        self.seen.append(found)
        return found


def compare(bench: Bench) -> dict[str, Any]:
    """One comparison of plain with plain, judged with and without the windows that others disturbed."""
    watched = EveryWindow(bench)
    extent = Extent(looks=LOOKS, enough="clear", deadline_s=time.perf_counter() + 60)
    found = windows.measure(watched, {}, extent, purpose="winner")  # type: ignore[arg-type]
    judged = found.compare()
    firsts = [w.training_step_s for w in watched.seen[::2]]
    seconds = [w.training_step_s for w in watched.seen[1::2]]
    lots = random.Random(len(firsts))  # which of the two is called the candidate in the second judgement
    sides = [(a, b) if lots.random() < 0.5 else (b, a) for a, b in zip(firsts, seconds, strict=True)]
    raw = stats.compare([a for a, _ in sides], [b for _, b in sides])
    return {
        "verdict": judged.verdict,
        "ratio": judged.ratio, "low": judged.low, "high": judged.high, "low99": judged.low99, "high99": judged.high99,
        "num_pairs": judged.num_pairs, "num_discarded": found.num_discarded, "reason": judged.reason,
        "all_windows_verdict": raw.verdict, "all_windows_covered": raw.low <= 1 <= raw.high,
        "baseline_step_s": [round(s, 7) for s in found.baseline_s],
        "candidate_step_s": [round(s, 7) for s in found.candidate_s],
        "candidate_first": found.candidate_first, "share": found.share,
    }  # fmt: skip


@contextlib.contextmanager
def neighbour(condition: str) -> Iterator[None]:
    """Another process that loads one core, half a minute on and half a minute off."""
    if condition != "busy":
        yield
        return
    loop = "import time\nwhile True:\n end = time.time() + 30\n while time.time() < end: pass\n time.sleep(30)"
    process = subprocess.Popen([PYTHON, "-c", loop], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(name: str, words: list[str], num: int) -> Iterator[dict[str, Any]]:
    """So many comparisons of one script, in one run of it (started again where it ends)."""
    with tempfile.TemporaryDirectory(prefix="flatout-itself-") as folder:
        script = Script(path=words[0], arguments=tuple(words[1:]))
        bench = Bench(script, Path(folder), registry(), Terms())
        bench.cores_quota = read_machine().cores_quota
        bench.lots = random.Random(f"{name} {num}")
        with opened(bench):
            bench.start()
            bench.settle()
            for _ in range(num):
                begun_s = time.perf_counter()
                found = compare(bench)
                print(name, found["verdict"], f"{found['ratio']:.3f}", found["num_pairs"], flush=True)
                yield {"script": name, **found, "took_s": round(time.perf_counter() - begun_s, 1)}


def main() -> None:
    """All scripts by turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("condition", choices=("quiet", "busy"))
    parser.add_argument("--comparisons", type=int, default=300)
    parser.add_argument("--each", type=int, default=10, help="comparisons in one turn of a script")
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--onto", type=Path, help="a result to go on with")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.onto is not None:
        rows = json.loads(arguments.onto.read_text(encoding="utf-8"))["comparisons"]
    with neighbour(arguments.condition):
        while len(rows) < arguments.comparisons:
            for name in sorted(arguments.scripts, key=lambda name: sum(row["script"] == name for row in rows)):
                for row in measure(name, SCRIPTS[name], arguments.each):
                    rows.append(row)
                    write(f"claims_itself_{arguments.condition}", {"summary": summarized(rows), "comparisons": rows})
                print(summarized(rows), flush=True)


def summarized(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many were judged how."""
    known = [r for r in rows if r["low"] == r["low"]]
    return {
        "num_comparisons": len(rows),
        "verdicts": dict(Counter(r["verdict"] for r in rows)),
        "all_windows_verdicts": dict(Counter(r["all_windows_verdict"] for r in rows)),
        "covered": sum(r["low"] <= 1 <= r["high"] for r in known),
        "all_windows_covered": sum(r["all_windows_covered"] for r in rows),
        "num_with_interval": len(known),
        "without_an_interval": dict(Counter(r["reason"] for r in rows if r["low"] != r["low"])),
    }


if __name__ == "__main__":
    main()
