"""What is a diagnosis made from, and what does that say in seconds?

In: the anatomy, the census of one step, samples, counterfactuals, ceilings. Out: `Findings`, and what follows from
them by arithmetic alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flatout.judge import stats
from flatout.judge.activity import Activity, SlowSteps
from flatout.judge.anatomy import Account, Anatomy
from flatout.judge.stats import Comparison
from flatout.records.ceilings import Ceiling, Ceilings
from flatout.records.facts import Facts
from flatout.records.trace import Census, Scaling

COMPUTING = ("forward", "loss", "backward", "optimizer")

SHORTEST_BACK_TO_BACK = 2 / 3
"""Of its time in a step, what computing is believed to take back to back at the least; seen on CPUs: 0.75 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that a diagnosis is made from."""

    anatomy: Anatomy
    facts: Facts
    num_cores: int
    counterfactuals: Mapping[str, Comparison]
    """By remedy: `free_data`, `fitting_threads`, ..."""
    census: Census | None = None
    scaling: Scaling | None = None
    ceilings: Ceilings | None = None
    activity: Activity | None = None
    slow_steps: SlowSteps | None = None
    accounts: Mapping[str, Account] = field(default_factory=dict)
    """By how the step was looked at: `taken apart`, `sampled`."""


def arithmetic_of(facts: Facts) -> str:
    """The width of floats in which the script multiplies; of the script's own half precision only the kind is known.

    On a GPU `autocast` may mean float16 or bfloat16, which run at one rate.
    """
    dtypes = {dtype for model in facts.models for dtype in model.dtypes}
    if facts.autocast or (dtypes and dtypes <= {"bfloat16", "float16"}):
        return "float16" if dtypes == {"float16"} else "bfloat16"
    return "tf32" if facts.device == "cuda" and facts.matmul_precision != "highest" else "float32"


def peak(found: Findings) -> Ceiling | None:
    """The ceiling of the script's own arithmetic; float16 runs at bfloat16's rate where only that was measured."""
    if found.ceilings is None:
        return None
    arithmetic = arithmetic_of(found.facts)
    return found.ceilings.peak(arithmetic) or (found.ceilings.peak("bfloat16") if arithmetic == "float16" else None)


def without(seconds: float, found: Findings, all_s: float | None = None) -> float:
    """How many times as fast the step, or `all_s`, would be without these seconds of it, at most a thousand times."""
    all_s = found.anatomy.step_s if all_s is None else all_s
    return max(all_s / max(all_s - seconds, all_s * 1e-3), 1.0)


def with_checkpoints_s(found: Findings) -> float:
    """Seconds of a mean step and of its part of the checkpoints between steps."""
    return found.anatomy.step_s + found.anatomy.outside_s.get("checkpoint", 0.0)


def phase_s(found: Findings, name: str) -> float:
    """Seconds of a phase in a mean step; 0 where it was not observed."""
    return found.anatomy.phases_s.get(name, 0.0)


def model_s(found: Findings) -> float:
    """Seconds of the model itself, forward and backward."""
    return sum(found.anatomy.phases_s.get(name, 0.0) for name in ("forward", "backward"))


def back_to_back(found: Findings) -> float:
    """What computing takes where nothing comes between, as a share of what it takes in the script's steps.

    Caches are cold and threads asleep after a long interruption. The model's calls replayed one after the other say
    how much that is; a loss, which is not replayed, is taken to cost as much backward as forward. 1 where it is not
    known, and on a GPU, which is not interrupted.
    """
    in_step_s = model_s(found) - phase_s(found, "loss")
    if found.scaling is None or not found.scaling.full_s or in_step_s <= 0 or found.facts.device != "cpu":
        return 1.0
    warm = found.scaling.full_s[len(found.scaling.full_s) // 2 :]
    return min(max(stats.summarize(warm).median / in_step_s, SHORTEST_BACK_TO_BACK), 1.0)


def eased_s(saved_s: float, found: Findings) -> float:
    """Seconds of computing that end with `saved_s` of interruptions: their share of what `back_to_back` promises."""
    computing_s, all_s = _computing_s(found), with_checkpoints_s(found)
    interrupted_s = all_s - computing_s
    if interrupted_s <= 0:
        return 0.0
    left_s = max(min(computing_s, all_s - saved_s), 0.0)
    return (1 - back_to_back(found)) * left_s * min(saved_s / interrupted_s, 1.0)


def assumed_s(saved_s: float, found: Findings) -> float:
    """Of `eased_s` what was not replayed, but is taken to gain as much as the model's calls."""
    computing_s = _computing_s(found)
    if computing_s <= 0:
        return 0.0
    return eased_s(saved_s, found) * (phase_s(found, "loss") + phase_s(found, "optimizer")) / computing_s


def uninterrupted(saved_s: float, found: Findings, all_s: float | None = None) -> float:
    """How many times as fast the step would be without an interruption, and with what that lets be quicker.

    Args:
        saved_s: What the interruption takes of a mean step.
        found: For what is quicker back to back.
        all_s: What that is a part of, where that is not the step.
    """
    return without(saved_s + eased_s(saved_s, found), found, all_s)


def _computing_s(found: Findings) -> float:
    return sum(phase_s(found, name) for name in COMPUTING)


def fixed_s(found: Findings) -> float | None:
    """Seconds of a step's model calls that do not shrink with the batch.

    With t(b) = fixed + b c follows fixed = 2 t(b/2) - t(b).
    """
    if found.scaling is None or not found.scaling.full_s or not found.scaling.half_s:
        return None
    full = stats.summarize(found.scaling.full_s).median
    half = stats.summarize(found.scaling.half_s).median
    if full <= 0:
        return None
    return min(max((2 * half - full) / full, 0.0), 1.0) * model_s(found)


def fixed_share(found: Findings) -> float | None:
    """The same as a share of the time of the model."""
    fixed = fixed_s(found)
    model = model_s(found)
    return None if fixed is None or model <= 0 else fixed / model


def believed(counterfactual: Comparison | None, otherwise: float) -> float:
    """The measured gain where it is sure, else what is known otherwise as far as the interval admits it."""
    if counterfactual is None or not math.isfinite(counterfactual.ratio):
        return otherwise
    if counterfactual.verdict != "inconclusive":
        return counterfactual.ratio
    return min(max(otherwise, counterfactual.low), counterfactual.high)
