"""Which limit binds, how sure is that, and what can a remedy bring at most?

In: the anatomy, the census of one step, measured counterfactuals and the machine's ceilings. Out: a `Diagnosis` that
names what binds with its evidence, and a bound for each remedy, measured before anything was tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout import stats
from flatout.anatomy import Anatomy
from flatout.ceilings import Ceiling, Ceilings, model_flops_utilization, utilization_fault
from flatout.stats import Comparison
from flatout.trace import Census, Facts, Scaling

#: What can bind.
BINDINGS = (
    "input",
    "compute",
    "memory bandwidth",
    "launch overhead",
    "host synchronisation",
    "thread oversubscription",
    "optimizer",
    "nothing",
)

WORTHWHILE = 1.1
"""A remedy whose bound is lower than this does not name the bottleneck."""

FIXED_SHARE = 0.5
"""Share of the model's time that does not shrink with the batch, from which on starting operations is what costs."""

FAIR_RATE = 0.25
"""Share of the bandwidth ceiling from which on an operation counts as moving data."""

NEARLY_EQUAL = 0.9
"""A cause that is worth this share of the largest one is named beside it."""

COUNTED_TWICE = 0.01
"""Phases that exceed the step by more than this share of it are an error of ours, and said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that a remedy can bring.

    Attributes:
        remedy: What would be free, e.g. `free data`.
        ratio: Step time now over step time then.
        low: Lower end of the 95 % interval, NaN where it follows from shares.
        high: Upper end of the 95 % interval.
        how: How it was obtained, in a few words.
        shortens: The phases that the remedy shortens; a lever that shortens none of them cannot bring it.
    """

    remedy: str
    ratio: float
    low: float
    high: float
    how: str
    shortens: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What holds the script back.

    Attributes:
        binding: One of `BINDINGS`.
        sentence: The same for people, in one sentence.
        evidence: The measurements that say so.
        bounds: One per remedy, largest first.
        model_flops_per_step: Multiply-adds of matrix products and convolutions times two; None where not counted.
        achieved_flops_per_s: The same over the step time.
        model_flops_utilization: Achieved over the measured ceiling of `arithmetic`; None where either is missing. Above
            1 it is said in the notes, never clamped.
        arithmetic: What the script multiplies in: `float32`, `tf32`, `bfloat16` ...
        notes: What the reader must know, e.g. operations that were not counted.
    """

    binding: str
    sentence: str
    evidence: tuple[str, ...]
    bounds: tuple[Bound, ...]
    model_flops_per_step: int | None = None
    achieved_flops_per_s: float | None = None
    model_flops_utilization: float | None = None
    notes: tuple[str, ...] = ()
    arithmetic: str = "float32"


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


def diagnose(found: Findings) -> Diagnosis:
    """Name what binds."""
    bounds = tuple(sorted(_bounds(found), key=lambda b: -b.ratio))
    binding = _binding(found, bounds)
    flops = found.census.flops if found.census and found.census.flops else None
    utilization = _utilization(found, flops)
    return Diagnosis(
        binding=binding,
        sentence=_sentence(binding, found),
        evidence=tuple(_evidence(binding, found, bounds)),
        bounds=bounds,
        model_flops_per_step=flops,
        achieved_flops_per_s=flops / found.anatomy.step_s if flops else None,
        model_flops_utilization=utilization,
        notes=tuple(_notes(found, utilization)),
        arithmetic=arithmetic_of(found.facts),
    )


def arithmetic_of(facts: Facts) -> str:
    """The width of floats in which the script multiplies; of the script's own half precision only the kind is known.

    On a GPU `autocast` may mean float16 or bfloat16, which run at one rate.
    """
    dtypes = {dtype for model in facts.models for dtype in model.dtypes}
    if facts.autocast or (dtypes and dtypes <= {"bfloat16", "float16"}):
        return "float16" if dtypes == {"float16"} else "bfloat16"
    return "tf32" if facts.device == "cuda" and facts.matmul_precision != "highest" else "float32"


def _peak(found: Findings) -> Ceiling | None:
    """The ceiling of the script's own arithmetic; float16 runs at bfloat16's rate where only that was measured."""
    if found.ceilings is None:
        return None
    arithmetic = arithmetic_of(found.facts)
    return found.ceilings.peak(arithmetic) or (found.ceilings.peak("bfloat16") if arithmetic == "float16" else None)


def _bounds(found: Findings) -> list[Bound]:
    result = []
    free_data = found.counterfactuals.get("free_data")
    data = found.anatomy.phases_s.get("data")
    if free_data is not None and math.isfinite(free_data.ratio):
        result.append(_measured("free data", free_data, "one cached batch replayed", ("data",)))
    elif data is not None:
        result.append(_from_seconds("free data", data, found, "its share of the step", ("data",)))
    threads = found.counterfactuals.get("fitting_threads")
    if threads is not None and math.isfinite(threads.ratio):
        shortened = ("forward", "loss", "backward", "optimizer", "data")
        result.append(_measured("threads that fit", threads, f"{found.num_cores} threads in turn with now", shortened))
    seconds = (
        ("free launches", _fixed_s(found), "model calls replayed at half the batch", ("forward", "backward", "loss")),
        ("free optimizer", found.anatomy.phases_s.get("optimizer"), "its share of the step", ("optimizer",)),
        ("no host synchronisation", found.anatomy.phases_s.get("sync"), "its share of the step", ("sync",)),
        ("compute at its dtype's ceiling", _compute_slack_s(found), "the step's FLOPs at the measured ceiling",
         ("forward", "backward")),
    )  # fmt: skip
    for remedy, saved_s, how, shortens in seconds:
        if saved_s is not None:
            result.append(_from_seconds(remedy, saved_s, found, how, shortens))
    return result


def _measured(remedy: str, comparison: Comparison, how: str, shortens: tuple[str, ...]) -> Bound:
    ratio = max(comparison.ratio, 1.0)  # a remedy that is measured as slower brings nothing at most
    return Bound(remedy=remedy, ratio=ratio, low=comparison.low, high=comparison.high, how=how, shortens=shortens)


def _from_seconds(remedy: str, saved_s: float, found: Findings, how: str, shortens: tuple[str, ...]) -> Bound:
    nan = float("nan")
    return Bound(remedy=remedy, ratio=_without(saved_s, found), low=nan, high=nan, how=how, shortens=shortens)


def _without(seconds: float, found: Findings) -> float:
    """How many times as fast the step would be without these seconds of it, at most a thousand times."""
    step_s = found.anatomy.step_s
    return max(step_s / max(step_s - seconds, step_s * 1e-3), 1.0)


def _fixed_s(found: Findings) -> float | None:
    """Seconds of a step's model calls that do not shrink with the batch.

    With t(b) = fixed + b c follows fixed = 2 t(b/2) - t(b).
    """
    if found.scaling is None or not found.scaling.full_s or not found.scaling.half_s:
        return None
    full = stats.summarize(found.scaling.full_s).median
    half = stats.summarize(found.scaling.half_s).median
    if full <= 0:
        return None
    return min(max((2 * half - full) / full, 0.0), 1.0) * _model_s(found)


def _fixed_share(found: Findings) -> float | None:
    fixed = _fixed_s(found)
    model = _model_s(found)
    return None if fixed is None or model <= 0 else fixed / model


def _model_s(found: Findings) -> float:
    return sum(found.anatomy.phases_s.get(name, 0.0) for name in ("forward", "backward"))


def _compute_slack_s(found: Findings) -> float | None:
    peak = _peak(found)
    if peak is None or found.census is None or not found.census.flops or _model_s(found) <= 0:
        return None
    return max(_model_s(found) - found.census.flops / peak.value, 0.0)


def _binding(found: Findings, bounds: Sequence[Bound]) -> str:
    threads = _believed(found.counterfactuals.get("fitting_threads"), 1.0)
    if found.facts.num_threads > found.num_cores and threads >= WORTHWHILE:
        return "thread oversubscription"
    name, ratio = max(_causes(found, bounds).items(), key=lambda item: item[1])
    return name if ratio >= WORTHWHILE else "nothing"


def _causes(found: Findings, bounds: Sequence[Bound]) -> dict[str, float]:
    """Each cause that can hold a step back, and how many times as fast the step would be without it."""
    by_remedy = {b.remedy: b.ratio for b in bounds}
    return {
        "input": _believed(found.counterfactuals.get("free_data"), _without(_phase_s(found, "data"), found)),
        "optimizer": by_remedy.get("free optimizer", 1.0),
        "host synchronisation": by_remedy.get("no host synchronisation", 1.0),
        # What the step would gain if the model itself cost nothing, on the same scale as the other causes.
        _model_cause(found): _without(_model_s(found) + _phase_s(found, "loss"), found),
    }


def _believed(counterfactual: Comparison | None, otherwise: float) -> float:
    """The measured gain where it is sure, else what is known otherwise as far as the interval admits it."""
    if counterfactual is None or not math.isfinite(counterfactual.ratio):
        return otherwise
    if counterfactual.verdict != "inconclusive":
        return counterfactual.ratio
    return min(max(otherwise, counterfactual.low), counterfactual.high)


def _phase_s(found: Findings, name: str) -> float:
    return found.anatomy.phases_s.get(name, 0.0)


def _model_cause(found: Findings) -> str:
    share = _fixed_share(found)
    if (_launch_share(found) if share is None else share) >= FIXED_SHARE:
        return "launch overhead"
    return "memory bandwidth" if _memory_bound_share(found) > 0.5 else "compute"


def _launch_share(found: Findings) -> float:
    """Number of operations times the measured cost of starting one, over the time of the model."""
    launch = found.ceilings.get("kernel_launch") if found.ceilings else None
    if launch is None or found.census is None or _model_s(found) <= 0:
        return 0.0
    return found.census.num_operations * launch.value / _model_s(found)


def _memory_bound_share(found: Findings) -> float:
    """Share of the operations' time in those left of the roofline's ridge that do move data at a fair part of its rate.

    A tiny operation lies left of the ridge too, but what it waits for is its own start. On a GPU an operation's own
    time on the host says nothing: there its time is what the roofline gives it.
    """
    bandwidth = found.ceilings.get("memory_copy") if found.ceilings else None
    peak = _peak(found)
    if found.census is None or peak is None or bandwidth is None:
        return 0.0
    ridge = peak.value / bandwidth.value
    total_s = moving_s = 0.0
    for op in found.census.operations:
        seconds = op.self_s
        if found.facts.device != "cpu":
            seconds = max(op.flops / peak.value, op.moved_bytes / bandwidth.value)
        total_s += seconds
        if op.flops < ridge * max(op.moved_bytes, 1) and op.moved_bytes >= FAIR_RATE * bandwidth.value * seconds:
            moving_s += seconds
    return moving_s / total_s if total_s > 0 else 0.0


def _utilization(found: Findings, flops: int | None) -> float | None:
    peak = _peak(found)
    if peak is None or flops is None or peak.value <= 0:
        return None
    return model_flops_utilization(flops, found.anatomy.step_s, peak_flops_per_s=peak.value)


def _sentence(binding: str, found: Findings) -> str:
    workers = max((loader.num_workers for loader in found.facts.loaders), default=0)
    by = f"by {workers} workers that do not keep up" if workers else "item by item in the training process"
    sentences = {
        "input": f"input: batches are built {by} while the model waits",
        "compute": "compute: the time goes into the model's own operations, forward and backward",
        "memory bandwidth": "memory bandwidth: the time goes into operations that move more than they compute",
        "launch overhead": "launch overhead: many small operations, whose starting costs more than their work",
        "host synchronisation": "host synchronisation: the program waits for single values from the device",
        "thread oversubscription": f"thread oversubscription: {found.facts.num_threads} threads on "
        f"{found.num_cores} cores",
        "optimizer": "optimizer: the update costs more than the model",
        "nothing": _nothing(found),
    }
    return sentences[binding]


def _nothing(found: Findings) -> str:
    """No cause that is known; a large part that belongs to none of them is said."""
    name, seconds = max(found.anatomy.phases_s.items(), key=lambda item: item[1], default=("", 0.0))
    if _without(seconds, found) < WORTHWHILE:
        return "nothing: no single cause, freed entirely, would bring 10 %"
    share = f"{_percent(seconds / found.anatomy.step_s)} of the step"
    if name == "unattributed":
        return f"nothing that can be named: {share} lies outside every phase that was seen"
    return f"nothing that can be named: {share} is `{name}`"


#: The remedy that would free what binds.
REMEDIES = {
    "input": "free data",
    "compute": "compute at its dtype's ceiling",
    "launch overhead": "free launches",
    "host synchronisation": "no host synchronisation",
    "thread oversubscription": "threads that fit",
    "optimizer": "free optimizer",
}


def _evidence(binding: str, found: Findings, bounds: Sequence[Bound]) -> list[str]:
    lines = []
    main = {"input": "data", "optimizer": "optimizer", "host synchronisation": "sync"}.get(binding, "")
    share = found.anatomy.share(main)
    if share is not None:
        lines.append(f"{main} takes {_percent(share)} of the step")
    lines += _nearly_as_large(binding, _causes(found, bounds))
    for bound in sorted(bounds, key=lambda b: b.remedy != REMEDIES.get(binding))[:2]:  # its own first, then the largest
        lines.append(f"{bound.remedy}: at most {bound.ratio:.2f}x ({bound.how})")
    fixed = _fixed_share(found)
    if fixed is not None and binding in ("launch overhead", "compute", "memory bandwidth"):
        lines.append(f"{_percent(fixed)} of the model's time does not shrink with the batch")
    if found.census is not None:
        lines.append(f"{found.census.num_operations:,} operations a step")
        if found.census.num_syncs:
            waits = "on a CPU that waits for nothing" if found.facts.device == "cpu" else "each waits for the device"
            values = "value" if found.census.num_syncs == 1 else "values"
            lines.append(f"{found.census.num_syncs:,} {values} read back a step (`.item()` and the like); {waits}")
    if found.facts.num_threads > found.num_cores:
        lines.append(f"{found.facts.num_threads} threads on {found.num_cores} cores")
    return lines


def _nearly_as_large(binding: str, causes: Mapping[str, float]) -> list[str]:
    """A tie is no clear answer, and another hour may name the other cause."""
    largest = causes.get(binding, math.inf)
    return [
        f"{name} is nearly as large: {ratio:.2f}x without it, {largest:.2f}x without {binding}"
        for name, ratio in causes.items()
        if name != binding and ratio >= max(WORTHWHILE, NEARLY_EQUAL * largest)
    ]


def _notes(found: Findings, utilization: float | None) -> list[str]:
    lines = []
    if utilization is not None and (fault := utilization_fault(utilization)):
        lines.append(fault)
    rest = found.anatomy.share("unattributed")
    if rest is not None and rest < -COUNTED_TWICE:
        lines.append(f"the phases sum to {_percent(-rest)} more than the step: something was counted twice")
    if found.census is not None and found.census.uncounted:
        lines.append("no FLOP formula for: " + ", ".join(f"`{name}`" for name in found.census.uncounted[:6]))
    if dearer := _dearer_than_its_phase(found):
        lines.append(dearer)
    if found.anatomy.not_observed:
        lines.append("not observed: " + ", ".join(found.anatomy.not_observed))
    return lines


def _dearer_than_its_phase(found: Findings) -> str | None:
    """Fetching that costs the step surely more than the time that the step waits for it."""
    free_data = found.counterfactuals.get("free_data")
    share = found.anatomy.share("data")
    if free_data is None or share is None or not free_data.low > WORTHWHILE * _without(_phase_s(found, "data"), found):
        return None
    workers = any(loader.num_workers for loader in found.facts.loaders)
    who = "workers that fetch take cores" if workers else "fetching takes caches and memory"
    return f"free data would bring more than the {_percent(share)} that `data` takes: {who} from the rest of the step"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
