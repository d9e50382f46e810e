"""What is said of ranks on the pages of JSON and of the plan file: keys with their meaning, and examples.

In: the records as they are. Out: rows and values for `reference_examples.py`. Numbers are invented.
"""

from __future__ import annotations

from typing import Any

from flatout.judge.rank_tuning import FORMAT, RankTrial, RankTuning, summary_of
from flatout.records.ceilings import Machine

Row = tuple[str, str, str]

TUNE_RANKS: list[Row] = [
    (
        "verdict",
        "string",
        "`faster`; `one rank is faster` where every division surely is slower; `no difference`; `inconclusive`; "
        "`not divided` where none trains what one process does",
    ),
    ("ranks", "integer", "ranks of the plan; 1 where one process is to stay"),
    ("mode", "string or null", "how they divide the work; null where one process is to stay"),
    ("ratio", "number", "how many times as fast as one process under the same levers; 1 where that is to stay"),
    ("ratio_low", "number", "lower end of its 95 % interval; 1 where one process is to stay"),
    ("ratio_high", "number", "upper end of its 95 % interval; 1 where one process is to stay"),
    ("levers", "list of strings", "the plan's levers, under which all runs were timed"),
    ("communication", "object", "levers of communication that won on the ranks of the plan, with their settings"),
    ("step_s", "number", "one process: median over its runs of their median settled step"),
    ("spread_fraction", "number or null", "half the interquartile range of these runs over their median"),
    ("peak_memory_bytes", "integer or null", "highest memory of one process, from its start on"),
    ("step_memory_bytes", "integer or null", "the same within a step, median over the steps that were compared"),
    ("steps", "integer", "steps of each run that was timed"),
    ("compared_steps", "integer", "steps after which losses and parameters were compared"),
    ("trials", "list of objects", "what was tried, see below"),
    ("tuning_s", "number", "wall seconds that all of it took"),
    ("plan", "string or null", "the plan file that was written; null where none was"),
    ("run", "string", "absolute path of the run folder, with `rank-tuning.json`"),
]
RANK_TRIAL: list[Row] = [
    ("ranks", "integer", "how many"),
    ("mode", "string", "how they divide the work"),
    ("levers", "object", "levers of communication that were engaged, with their settings"),
    (
        "outcome",
        "string",
        "`faster`, `slower`, `no difference`, `inconclusive`: beside one process, and with such levers beside the same "
        "without the last; `disagrees` where other numbers are trained; `refused` where it cannot be divided; `failed`",
    ),
    ("reason", "string", "why, where the outcome needs it"),
    ("cause", "string", "of a refusal or failure: why"),
    ("hint", "string", "of a refusal or failure: what helps"),
    ("ratio", "number or null", "step time of one process over that of the ranks; null where not measured"),
    ("ratio_low", "number or null", "lower end of its 95 % interval"),
    ("ratio_high", "number or null", "upper end of its 95 % interval"),
    ("num_pairs", "integer", "pairs of runs behind it"),
    ("step_s", "number or null", "median over its runs of their median settled step on rank 0"),
    ("spread_fraction", "number or null", "half the interquartile range of these runs over their median"),
    ("peak_memory_bytes", "integer or null", "highest memory of one rank, from its start on"),
    (
        "step_memory_bytes",
        "integer or null",
        "the same within a step, median over the steps that were compared: without calls that are computed both ways",
    ),
    ("exchanges_share", "number or null", "share of training that every rank spent in exchanges, computing nothing"),
    ("exchange_shares", "object", "the same for each kind of exchange, the costliest first"),
    ("agreement", "string", "`agrees`, `disagrees`, `inconclusive`; empty where it was not judged"),
    ("agreement_detail", "string", "the numbers behind it"),
    ("baseline_step_s", "list of numbers", "median step of each run of one process"),
    ("candidate_step_s", "list of numbers", "the same of the run on ranks beside it"),
    ("gain", "number or null", "step time without the last of its levers over that with it; null without levers"),
    ("gain_low", "number or null", "lower end of its 95 % interval"),
    ("gain_high", "number or null", "upper end of its 95 % interval"),
]


def tuning(machine: Machine) -> dict[str, Any]:
    """What `tune --ranks --json` prints."""
    ran = ((0.1, 0.101, 0.1, 0.1), (0.0323, 0.0322, 0.0321, 0.0324))
    trials = (
        RankTrial(
            num_ranks=4, mode="replicate", outcome="faster", ratio=3.1, ratio_low=3.02, ratio_high=3.19, num_pairs=4,
            step_s=0.0323, spread_fraction=0.003, peak_memory_bytes=2**30,
            step_memory_bytes=800 * 2**20, exchanges_share=0.11,
            exchange_shares={"outputs of `Net`": 0.06, "comparison of batches": 0.01}, agreement="agrees",
            agreement_detail="loss error 6.7e-08; parameter error 7.0e-08", baseline_step_s=ran[0],
            candidate_step_s=ran[1],
        ),
    )  # fmt: skip
    return summary_of(
        RankTuning(
            format=FORMAT, flatout="0.1.0", created="2026-01-31T12:30:00+00:00", script="train.py",
            typed="train.py --epochs 3", machine=machine, framework="pytorch", framework_version="2.13.0+cpu",
            num_ranks=4, verdict="faster", levers={}, step_s=0.1, spread_fraction=0.002, num_steps=30,
            num_compared_steps=20, num_runs=22, trials=trials, tuning_s=212.0, peak_memory_bytes=2**30,
            step_memory_bytes=900 * 2**20, plan_path="flatout.toml", run="/home/me/.flatout/train-2",
        )
    )  # fmt: skip
