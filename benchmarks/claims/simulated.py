"""How often is "faster" wrong, and how often is a gain missed? The product's own measuring, on simulated machines.

    python benchmarks/claims/simulated.py [--comparisons 10000] [--models white drift ...]

`trials.windows.measure` is run as `tune` runs it: plain against plain first, then a candidate in the looks of screening
and in those of the final measurement; only the bench is simulated, from the noise models beside this file. For each
model: a candidate that is plain itself (A/A), one that is 5 % faster, and the same where the model is scaled so that
its windows scatter by 3 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from noise_models import MODELS, WINDOW, Slowdowns

from flatout.judge import paired, stats
from flatout.judge.paired import Extent
from flatout.judge.sequential import Looks
from flatout.records.trace import Levers, Window
from flatout.trials import conduct, windows
from flatout.trials.budget import Size
from measuring import write

STEP_S = 0.004
GAIN = 1.05
MOST_WINDOWS = 60

#: What is asked of a comparison: purpose, its looks and what ends it, as `trials.conduct` asks.
KINDS = {
    "screening": (paired.SCREENING, "known"),
    "final": (Looks.alike(conduct.FINAL_PAIRS, conduct.MOST_FINAL_PAIRS), "clear"),
}


class SimulatedBench:
    """A script on a machine whose slowdowns are given; windows lie one after the other on them."""

    def __init__(self, slowdowns: Slowdowns, gain: float, seed: int) -> None:
        self.size = Size(num_steps=WINDOW - 2, skip_steps=2, loader_skip_steps=2)
        self.levers: dict[str, Any] = {}
        self.last_evidence: dict[str, str] = {}
        self.last_missing: dict[str, str] = {}
        self.lots = random.Random(seed)
        self.noise = 0.0
        self._elapsed = np.concatenate([[0.0], np.cumsum(slowdowns)])
        self._position = 0
        self._gain = gain

    def window(self, levers: Levers, *, purpose: str, skip: int, num_steps: int, **_: Any) -> Window:
        """The next stretch of the machine's time, as one step that is its mean."""
        begin = self._position + skip
        self._position = end = begin + num_steps
        mean = float(self._elapsed[end] - self._elapsed[begin]) / num_steps
        step_s = STEP_S * mean / (self._gain if levers else 1.0)
        return Window(
            index=0, purpose=purpose, levers=levers, observe="ends", step_s=(step_s,), outside_s=(0.0,), start_s=0.0
        )

    def resize_after(self, window: Window) -> bool:
        """Windows keep their size."""
        return False


@dataclass(frozen=True)
class Case:
    """What is compared: which looks, the true gain, and by how much windows shall scatter (None: as the model does)."""

    kind: str
    gain: float
    scatter: float | None = None

    @property
    def name(self) -> str:
        """How the results call it."""
        what = "itself" if self.gain == 1 else "gain"
        return f"{self.kind}_{what}" + (f"_at_{self.scatter:.0%}" if self.scatter else "")


CASES = [Case(kind, gain) for kind in KINDS for gain in (1.0, GAIN)] + [Case("final", GAIN, 0.03)]


def compared(model: str, case: Case, power: float, seed: int) -> tuple[stats.Comparison, int]:
    """One comparison on a machine of that seed, as `tune` makes it; with the number of windows of the candidate's."""
    looks, enough = KINDS[case.kind]
    num_windows = int(2 * (conduct.NOISE_PAIRS + looks.at[-1]) * (1 + paired.STRETCH)) + 1
    chance = np.random.default_rng([seed, list(MODELS).index(model)])
    bench = SimulatedBench(MODELS[model](chance, num_windows * WINDOW) ** power, case.gain, seed)
    ever = time.perf_counter() + 3600
    plain = windows.measure(
        bench, {}, Extent(looks=Looks.alike(conduct.NOISE_PAIRS), enough="all", deadline_s=ever), purpose="baseline"
    )
    bench.noise = stats.scatter(plain.baseline_s, plain.candidate_s)
    found = windows.measure(bench, {"lever": {}}, Extent(looks=looks, enough=enough, deadline_s=ever), purpose="trial")
    return found.compare(), 2 * len(found.baseline_s)


def study(model: str, num: int) -> dict[str, Any]:
    """Error rates under one model."""
    row: dict[str, Any] = {"num_comparisons": num, "window_scatter": scatter_of(model)}
    for case in CASES:
        power = case.scatter / row["window_scatter"] if case.scatter else 1.0
        gain, found = case.gain, [compared(model, case, power, seed) for seed in range(num)]
        judged = [(c, n) for c, n in found if np.isfinite(c.ratio)]  # two hopeless pairs are left without an interval
        verdicts = [c.verdict for c, _ in found]
        row[case.name] = {
            "judged": len(judged),
            "faster": verdicts.count("faster"),
            "slower": verdicts.count("slower"),
            "no_difference": verdicts.count("no difference"),
            "covered": sum(c.low <= gain <= c.high for c, _ in judged),
            "covered99": sum(c.low99 <= gain <= c.high99 for c, _ in judged),
            "found_within_60_windows": sum(c.verdict == "faster" and n <= MOST_WINDOWS for c, n in found),
            "median_windows": float(np.median([n for _, n in found])),
            "median_half_width": float(np.median([(c.high - c.low) / 2 for c, _ in judged])) if judged else None,
        }
    return row


def scatter_of(model: str) -> float:
    """The median standard deviation of a window's logarithm under a model, over stretches of 56 windows."""
    deviations = []
    for seed in range(200):
        steps = MODELS[model](np.random.default_rng(seed), 56 * WINDOW)
        deviations.append(np.std(np.log(steps.reshape(-1, WINDOW)[:, 2:].mean(axis=1))))
    return float(np.median(deviations))


def main() -> None:
    """All models, two at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--comparisons", type=int, default=10_000)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    with multiprocessing.Pool(2) as pool:
        jobs = {name: pool.apply_async(study, (name, arguments.comparisons)) for name in arguments.models}
        rows = {name: job.get() for name, job in jobs.items()}
    for name, row in rows.items():
        print(name, f"windows scatter by {row['window_scatter']:.3f}")
        for case in CASES:
            print("   ", case.name, sentence(row[case.name], row["num_comparisons"]))
    if arguments.models == list(MODELS):
        write("claims_simulated", {"command": " ".join(sys.argv), "gain": GAIN, "models": rows})


def sentence(found: dict[str, Any], num: int) -> str:
    """One line for people."""
    judged = max(found["judged"], 1)
    return (
        f"faster {found['faster'] / num:.2%}, slower {found['slower'] / num:.2%}, "
        f"covered {found['covered'] / judged:.1%} / {found['covered99'] / judged:.2%} of {judged}, "
        f"found within {MOST_WINDOWS} windows {found['found_within_60_windows'] / num:.1%}, "
        f"windows {found['median_windows']:.0f}"
    )


if __name__ == "__main__":
    main()
