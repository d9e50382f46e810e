"""How was each number of the page obtained, and which command obtains it again?

In: a `Result`. Out: an `Evidence` for each anchor that a number of the page leads to. The samples themselves lie in the
run folder: what windows came to in `result.json`, the windows and comparisons in its traces.
"""

from __future__ import annotations

from flatout.judge.diagnosis import Bound
from flatout.judge.remedies import EASED, SHARE
from flatout.judge.result import Result
from flatout.report import energy, words
from flatout.report.tried import best
from flatout.report.view import Evidence

BASELINE, NOISE, ANATOMY, BOUNDS = "raw-baseline", "raw-noise", "raw-anatomy", "raw-bounds"
TRIALS, FINAL, NUMERICS, CENSUS = "raw-trials", "raw-final", "raw-numerics", "raw-census"
CEILINGS, STEPS, READS, ENERGY = "raw-ceilings", "raw-steps", "raw-reads", "raw-energy"
PROFILE = "raw-profile"
"""Where in the page it stands how a number was obtained."""


_HOW = {
    BASELINE: (
        "Steps a second",
        "median of {windows} of the plain script; only the ends of steps are timed. They are "
        "`baseline_window_step_s` in `result.json`",
    ),
    ANATOMY: (
        "Where a step goes",
        "means over {steps} in {apart} of their own that were disturbed least; watching costs time, so these windows "
        "enter no ratio. In the traces their purpose is `anatomy`, with the plan `winner`",
    ),
    BOUNDS: (
        "If free, at most",
        "each as its row says; measured before anything was tried, in turn with plain windows. In the traces their "
        "purpose is `counterfactual`",
    ),
    STEPS: ("Single steps", "every step of every window; of many the fastest and the slowest at each time are drawn"),
    NOISE: ("Two equal runs", "95 % interval of plain against plain, in alternating windows"),
    TRIALS: (
        "Ratios",
        "windows of plain and candidate in turn; 95 %: signed ranks from 8 pairs on, below that Student's t. They are "
        "`baseline_step_s` and `candidate_step_s` of each trial in `result.json`",
    ),
    FINAL: ("The final ratio", "{pairs} of windows after the choice: the best of many is partly luck"),
    NUMERICS: (
        "Numerics",
        "the same batch and random state with and without; norm of the difference. In the traces: `agreement`",
    ),
    CENSUS: (
        "FLOP and bytes",
        "one step, each operation counted by formula (two per multiply-add) and by its arguments' bytes",
    ),
    CEILINGS: ("Ceilings", "microbenchmarks, the 90th percentile of their windows; of times the 10th"),
    READS: (
        "Values read on the host",
        "windows of their own, in which each call that reads was timed. In the traces: `host_reads`",
    ),
    PROFILE: (
        "What a few steps are made of",
        "a window of its own under the framework's profiler, the last one of all. In the traces: `profile`, and as "
        "tracks of their own in `--export steps.json`",
    ),
    ENERGY: ("Energy", "{energy}"),
}
"""By anchor: which number, and how it was obtained."""


def evidence(result: Result) -> tuple[Evidence, ...]:
    """Everything that numbers of the page lead to."""
    why, tune = f"flatout why {result.typed}", f"{result.tune_command} {result.typed}"
    again = result.remeasured
    judged = any(trial.agreement for trial in (*result.trials, *([again] if again is not None else [])))
    commands = {
        BASELINE: tune if result.winner is not None else why,
        ANATOMY: tune if result.tuned_anatomy is not None else why,
        BOUNDS: why,
        STEPS: f"flatout report {result.run} --export steps.csv" if result.timeline else "",
        NOISE: why if result.noise is not None else "",
        TRIALS: tune if result.trials else "",
        FINAL: tune if again is not None else "",
        NUMERICS: tune if judged else "",
        CENSUS: why if result.census is not None else "",
        CEILINGS: "flatout machine --refresh" if result.ceilings is not None else "",
        READS: why if result.reads is not None and result.reads.sites else "",
        PROFILE: why if result.profiled is not None else "",
        ENERGY: (tune if result.trials else why) if result.energy is not None else "",
    }
    said = {
        "windows": words.plural(len(result.baseline_window_step_s), "window"),
        "steps": words.plural(result.anatomy.num_steps, "step"),
        "apart": words.plural(result.anatomy.num_windows, "window"),
        "pairs": words.plural(again.num_pairs if again is not None else 0, "further pair"),
        "energy": energy.how(result.energy) if result.energy is not None else "",
    }
    return tuple(
        Evidence(anchor=anchor, title=title, how=how.format(**said), command=commands[anchor])
        for anchor, (title, how) in _HOW.items()
        if commands[anchor]
    )


def headline(result: Result) -> str:
    """Behind the one number."""
    if result.command == "why":
        return BASELINE
    found = best(result)
    return NOISE if found is None else FINAL if found is result.remeasured else TRIALS


def behind_bound(bound: Bound) -> str:
    """Behind what a remedy can bring."""
    return ANATOMY if bound.how in (SHARE, EASED) else CENSUS if "ceiling" in bound.how else BOUNDS
