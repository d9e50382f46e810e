"""Tunings for ranks made by hand, one for each kind of verdict, for tests of the terminal and of the page."""

from dataclasses import replace

from flatout.judge.rank_tuning import FORMAT, RankTrial, RankTuning, verdict
from handmade import MACHINE

MIB = 2**20

SHARD = {"parameters": 0.19, "sum of gradients": 0.11, "norms of parts": 0.02, "rules": 0.0002}


def division(num=4, mode="replicate", ratio=1.5, outcome="faster", **changes):
    """A division as it is timed."""
    one, other = (0.2001, 0.1998, 0.2003, 0.1999), tuple(x / ratio for x in (0.2, 0.2004, 0.1997, 0.2002))
    fields = dict(
        num_ranks=num, mode=mode, outcome=outcome, ratio=ratio, ratio_low=ratio * 0.98, ratio_high=ratio * 1.03,
        num_pairs=4, step_s=0.2 / ratio, spread_fraction=0.011, peak_memory_bytes=1100 * MIB,
        step_memory_bytes=920 * MIB, exchanges_share=0.14, agreement="agrees",
        agreement_detail="loss error 4.3e-08; parameter error 2.6e-04", baseline_step_s=one, candidate_step_s=other,
        exchange_shares={"outputs of `Net`": 0.08, "gradients": 0.05, "comparison of batches": 0.004}, took_s=61.0,
    )  # fmt: skip
    return RankTrial(**{**fields, **changes})


def untimed(num, mode, outcome, **changes):
    """A division that has no step time."""
    return RankTrial(num_ranks=num, mode=mode, outcome=outcome, took_s=9.0, **changes)


TRIALS = (
    division(),
    division(4, "shard", 1.21, peak_memory_bytes=700 * MIB, step_memory_bytes=590 * MIB, exchanges_share=0.32,
             exchange_shares=SHARD),
    division(4, "tensor", 0.71, "slower", exchanges_share=0.61, step_memory_bytes=640 * MIB,
             exchange_shares={"sum of a divided layer": 0.34, "gradient of a divided layer": 0.26}),
    untimed(4, "pipeline", "refused", reason="`Net` cannot be cut into stages",
            cause="its batch normalisation would see micro-batches", hint="`--mode shard`"),
    division(2, "replicate", 1.03, "inconclusive", ratio_low=0.94, ratio_high=1.12,
             reason="the interval is too wide to tell"),
    untimed(2, "shard", "disagrees", agreement="disagrees", agreement_detail="loss error 0.003; parameter error 0.2",
            reason="loss error 0.003; parameter error 0.2", step_memory_bytes=700 * MIB),
)  # fmt: skip


def tuning(trials=TRIALS, **changes):
    """A whole one."""
    fields = dict(
        format=FORMAT, flatout="0.1.0", created="2026-11-21T10:46:07+00:00", script="gpt.py",
        typed="gpt.py --epochs 3", machine=MACHINE, framework="pytorch", framework_version="2.13.0+cpu", num_ranks=4,
        verdict=verdict(trials), levers={}, step_s=0.2, spread_fraction=0.004, num_steps=42, num_compared_steps=20,
        num_runs=31, trials=tuple(trials), tuning_s=412.0, peak_memory_bytes=1000 * MIB, step_memory_bytes=930 * MIB,
        plan_path="flatout.toml" if verdict(trials) == "faster" else None, run="/home/me/.flatout/gpt-2",
    )  # fmt: skip
    return RankTuning(**{**fields, **changes})


def faster():
    """Two divisions win."""
    return tuning(levers={"bf16": {}, "threads": {"num": 1}})


def one_rank():
    """Every division is slower."""
    return tuning([replace(t, outcome="slower", ratio=0.4, ratio_low=0.38, ratio_high=0.41) for t in TRIALS[:3]])


def inconclusive():
    """Stopped before there was an interval."""
    few = dict(outcome="inconclusive", num_pairs=2, reason="2 of at least 4 pairs of windows that are needed")
    trials = [replace(t, baseline_step_s=(0.2, 0.21), candidate_step_s=(0.15, 0.16), **few) for t in TRIALS[:2]]
    return tuning(trials, stopped="you stopped it", remarks=("without the levers of the plan: it is for PyTorch 2.11",))


def not_divided():
    """Nothing was timed."""
    return tuning((TRIALS[3], TRIALS[5]), step_memory_bytes=None)


def older():
    """A record that knew neither of memory within a step nor of kinds of exchange, of a name that could do harm."""
    trials = [replace(t, step_memory_bytes=None, exchange_shares={}) for t in TRIALS]
    return tuning(trials, step_memory_bytes=None, script="<b>evil</b>.py", typed="'<b>evil</b>.py'")


def many_ranks():
    """Every mode on eight, four and two ranks, with the longest names."""
    kinds = {f"gathering of what a very long kind of exchange number {n} is called": 0.1 / (n + 1) for n in range(12)}
    modes = ("replicate", "shard", "hybrid", "tensor", "pipeline", "replicate+tensor", "replicate+pipeline")
    trials = [
        division(num, mode, 1.0 + 0.2 * n, exchange_shares=kinds, ratio_high=40.0 if n == 3 else 1.1 + 0.2 * n)
        for num in (8, 4)
        for n, mode in enumerate(modes)
    ]
    return tuning(trials, num_ranks=8)


TUNINGS = {
    "faster": faster,
    "one rank": one_rank,
    "inconclusive": inconclusive,
    "not divided": not_divided,
    "older": older,
    "many ranks": many_ranks,
}
