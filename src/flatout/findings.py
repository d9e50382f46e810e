"""What is a diagnosis made from, and what does that say in seconds?

In: the anatomy, the census of one step, samples, counterfactuals, ceilings. Out: `Findings`, and what follows from
them by arithmetic alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flatout import stats
from flatout.activity import Activity, SlowSteps
from flatout.anatomy import Anatomy
from flatout.ceilings import Ceiling, Ceilings
from flatout.stats import Comparison
from flatout.trace import Census, Facts, Scaling


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


def without(seconds: float, found: Findings) -> float:
    """How many times as fast the step would be without these seconds of it, at most a thousand times."""
    step_s = found.anatomy.step_s
    return max(step_s / max(step_s - seconds, step_s * 1e-3), 1.0)


def phase_s(found: Findings, name: str) -> float:
    """Seconds of a phase in a mean step; 0 where it was not observed."""
    return found.anatomy.phases_s.get(name, 0.0)


def model_s(found: Findings) -> float:
    """Seconds of the model itself, forward and backward."""
    return sum(found.anatomy.phases_s.get(name, 0.0) for name in ("forward", "backward"))


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
