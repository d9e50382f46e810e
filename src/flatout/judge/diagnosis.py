"""Which limit binds, how sure is that, and what can a remedy bring at most?

In: the anatomy, the census of one step, measured counterfactuals and the machine's ceilings. Out: a `Diagnosis` that
names what binds with its evidence, and a bound for each remedy, measured before anything was tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.judge import explained
from flatout.judge.causes import (
    WORTHWHILE,
    causes,
    data_parts,
    interruptions,
    nearly_as_large,
    on_one_scale,
    phase_error,
    saved,
    share_errors,
)
from flatout.judge.findings import (
    Findings,
    arithmetic_of,
    assumed_s,
    believed,
    fixed_s,
    model_s,
    peak,
    uninterrupted,
    without,
)
from flatout.judge.stats import Comparison

#: What can bind.
BINDINGS = (
    "input",
    "compute",
    "memory bandwidth",
    "launch overhead",
    "host synchronisation",
    "thread oversubscription",
    "optimizer",
    "checkpoints",
    "garbage collection",
    "logging",
    "paging",
    "slow steps",
    "own code",
    "nothing",
)

NOT_CONCLUDED = "not concluded"
"""Instead of what binds, where measurements of the same step contradict each other."""

WORTH_A_ROW = 1.05
"""A cause that few scripts have is among the bounds from here on."""

#: The remedy that would free what binds.
REMEDIES = {
    "input": "free data",
    "compute": "compute at its dtype's ceiling",
    "launch overhead": "free launches",
    "host synchronisation": "no host synchronisation",
    "thread oversubscription": "threads that fit",
    "optimizer": "free optimizer",
    "checkpoints": "free checkpoints",
    "garbage collection": "no garbage collection",
    "logging": "no logging",
    "paging": "memory that suffices",
    "slow steps": "every step as the usual one",
    "own code": "free code between the parts",
}

#: The phase that a cause shows in.
PHASE_OF = {
    "input": "data",
    "optimizer": "optimizer",
    "host synchronisation": "sync",
    "garbage collection": "garbage",
    "own code": "unattributed",
}

SHARE = "its share of the step"
EASED = "its share, and computing that is quicker without it"

SEEN_AS_THEY_ARE = {
    "checkpoints": ("what lies between steps", ()),
    "garbage collection": (SHARE, ("garbage",)),
    "logging": ("sampled stacks", ()),
    "paging": ("sampled waiting", ()),
    "slow steps": ("what slow steps take beyond usual ones", ()),
    "own code": (SHARE, ()),
}
"""Causes whose bound is their own worth: how that was obtained, and which phase each is; of a part of one, none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that a remedy can bring.

    Attributes:
        remedy: What would be free, e.g. `free data`.
        ratio: Step time now over step time then.
        low: Lower end of the 95 % interval: of measured pairs; of shares, from their scatter between windows or the
            number of samples; NaN where there is neither.
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
        binding: One of `BINDINGS`, or `not concluded`.
        part: Where the input binds, or is nearly as large as what does, which part of fetching takes most: `storage`,
            `decode`, `transform`, `collate` or `worker start-up`; empty where it was not seen.
        also: Causes that are nearly as large as what binds, and parts of fetching nearly as large as `part`.
        sentence: The same for people, in one sentence.
        evidence: The measurements that say so.
        bounds: One per remedy, largest first; where nothing is concluded those alone that were measured in pairs.
        model_flops_per_step: Multiply-adds of matrix products and convolutions times two; None where not counted.
        achieved_flops_per_s: The same over the step time.
        model_flops_utilization: Achieved over the measured ceiling of `arithmetic`; None where either is missing. Above
            1 it is said in the notes, never clamped.
        arithmetic: What the script multiplies in: `float32`, `tf32`, `bfloat16` ...
        notes: What the reader must know, e.g. operations that were not counted.
        contradictions: Measurements of the same step that exclude each other, and why perhaps: nothing is concluded.
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
    part: str = ""
    also: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()


def diagnose(found: Findings) -> Diagnosis:
    """Name what binds, where the account of the step closes."""
    alone = causes(found)
    bounds = tuple(sorted(_bounds(found, alone), key=lambda b: -b.ratio))
    worth = on_one_scale(alone, found)
    binding = _binding(found, worth)
    also = _not_told_apart(binding, worth, _errors(bounds, found))
    parts = data_parts(found) if "input" in (binding, *also) else ()
    flops = found.census.flops if found.census and found.census.flops else None
    utilization = _utilization(found, flops)
    named = Diagnosis(
        binding=binding,
        part=parts[0] if parts else "",
        also=(*also, *parts[1:]),
        sentence="; ".join([explained.sentence(binding, parts, found), *explained.beside(binding, also, worth)]),
        evidence=(
            *_main_share(binding, found),
            *explained.ties(binding, also, worth),
            *_best_bounds(binding, bounds),
            *explained.evidence(binding, found),
        ),
        bounds=bounds,
        model_flops_per_step=flops,
        achieved_flops_per_s=flops / found.anatomy.step_s if flops else None,
        model_flops_utilization=utilization,
        notes=tuple(explained.notes(found, utilization)),
        arithmetic=arithmetic_of(found.facts),
    )
    contradictions = tuple(explained.contradictions(found))
    return _not_concluded(named, contradictions) if contradictions else named


def _not_concluded(named: Diagnosis, contradictions: tuple[str, ...]) -> Diagnosis:
    """Without what rests on the step that was taken apart; what was measured in pairs with plain does not."""
    paired = (b for b in named.bounds if b.remedy in ("free data", "threads that fit") and b.how not in (SHARE, EASED))
    rest = replace(
        named, part="", also=(), evidence=contradictions, bounds=tuple(paired), achieved_flops_per_s=None,
        model_flops_utilization=None, contradictions=contradictions,
    )  # fmt: skip
    if named.binding == "thread oversubscription":  # so was this
        return rest
    return replace(rest, binding=NOT_CONCLUDED, sentence=f"{NOT_CONCLUDED}: {'; '.join(contradictions)}", evidence=())


def _main_share(binding: str, found: Findings) -> list[str]:
    phase = PHASE_OF.get(binding, "")
    share = found.anatomy.share(phase)
    return [] if share is None else [f"{phase} takes {100 * share:.0f} % of the step"]


def _best_bounds(binding: str, bounds: Sequence[Bound]) -> list[str]:
    """Its own remedy's first, then the largest."""
    first = sorted(bounds, key=lambda b: b.remedy != REMEDIES.get(binding))[:2]
    return [f"{bound.remedy}: at most {bound.ratio:.2f}x ({bound.how})" for bound in first]


def _bounds(found: Findings, worth: Mapping[str, float]) -> list[Bound]:
    result = []
    free_data = found.counterfactuals.get("free_data")
    data = found.anatomy.phases_s.get("data")
    if free_data is not None and math.isfinite(free_data.ratio):
        result.append(_measured("free data", free_data, "one cached batch replayed", ("data",)))
    elif data is not None:
        error = math.hypot(phase_error(found, "data"), assumed_s(data, found) / found.anatomy.step_s)
        ratio = uninterrupted(data, found)
        result.append(_of_share("free data", ratio, error, _said(SHARE, ratio, data, found), ("data",)))
    threads = found.counterfactuals.get("fitting_threads")
    if threads is not None and math.isfinite(threads.ratio):
        shortened = ("forward", "loss", "backward", "optimizer", "data")
        result.append(_measured("threads that fit", threads, f"{found.num_cores} threads in turn with now", shortened))
    nan = float("nan")
    seconds = (
        ("free launches", fixed_s(found), nan, "model calls replayed at half the batch",
         ("forward", "backward", "loss")),
        ("free optimizer", found.anatomy.phases_s.get("optimizer"), phase_error(found, "optimizer"),
         SHARE, ("optimizer",)),
        ("no host synchronisation", found.anatomy.phases_s.get("sync"), phase_error(found, "sync"),
         SHARE, ("sync",)),
        ("compute at its dtype's ceiling", _compute_slack_s(found), nan, "the step's FLOPs at the measured ceiling",
         ("forward", "backward")),
    )  # fmt: skip
    for remedy, saved_s, error, how, shortens in seconds:
        if saved_s is not None:
            result.append(_of_share(remedy, without(saved_s, found), error, how, shortens))
    return result + _rare_bounds(found, worth)


def _rare_bounds(found: Findings, worth: Mapping[str, float]) -> list[Bound]:
    errors, seconds = share_errors(found), interruptions(found)
    return [
        _of_share(
            REMEDIES[name],
            worth[name],
            errors.get(name, float("nan")),
            _said(how, worth[name], seconds[name], found),
            shortens,
        )
        for name, (how, shortens) in SEEN_AS_THEY_ARE.items()
        if worth[name] >= WORTH_A_ROW
    ]


def _said(how: str, ratio: float, saved_s: float, found: Findings) -> str:
    """How a bound is known, and whether more than the share itself is in it."""
    return EASED if how == SHARE and saved(ratio) > saved(without(saved_s, found)) + 0.005 else how


def _of_share(remedy: str, ratio: float, error: float, how: str, shortens: tuple[str, ...]) -> Bound:
    """A bound that follows from a share of the step; its interval from that share's own."""
    share = saved(ratio)
    low, high = (1 / max(1 - max(share + side * error, 0.0), 1e-3) for side in (-1, 1))
    return Bound(remedy=remedy, ratio=ratio, low=low, high=high, how=how, shortens=shortens)


def _measured(remedy: str, comparison: Comparison, how: str, shortens: tuple[str, ...]) -> Bound:
    ratio = max(comparison.ratio, 1.0)  # a remedy that is measured as slower brings nothing at most
    return Bound(remedy=remedy, ratio=ratio, low=comparison.low, high=comparison.high, how=how, shortens=shortens)


def _compute_slack_s(found: Findings) -> float | None:
    ceiling = peak(found)
    if ceiling is None or found.census is None or not found.census.flops or model_s(found) <= 0:
        return None
    flops = found.census.flops + found.census.recomputed_flops  # the hardware does these, too
    return max(model_s(found) - flops / ceiling.value, 0.0)


def _binding(found: Findings, worth: Mapping[str, float]) -> str:
    threads = believed(found.counterfactuals.get("fitting_threads"), 1.0)
    if found.facts.num_threads > found.num_cores and threads >= WORTHWHILE:
        return "thread oversubscription"
    name, ratio = max(worth.items(), key=lambda item: item[1])
    return name if ratio >= WORTHWHILE else "nothing"


def _not_told_apart(binding: str, worth: Mapping[str, float], errors: Mapping[str, float]) -> tuple[str, ...]:
    """What is nearly as large, or may be as large: a tie is no clear answer, and another hour may name the other."""
    if binding not in worth:  # too many threads make all else look larger than it is
        return ()
    largest = worth[binding]

    def alike(name: str) -> bool:
        error = math.hypot(errors.get(binding, 0.0), errors.get(name, 0.0))
        return nearly_as_large(worth[name], largest) or saved(largest) - saved(worth[name]) <= error

    return tuple(name for name in worth if name != binding and worth[name] >= WORTHWHILE and alike(name))


def _errors(bounds: Sequence[Bound], found: Findings) -> dict[str, float]:
    """Half of the interval of what is saved without each cause, as a share of all the time, where there is one."""
    known = {bound.remedy: bound for bound in bounds if math.isfinite(bound.low) and math.isfinite(bound.high)}
    errors = {}
    for name, remedy in REMEDIES.items():
        if remedy in known:
            ends = (on_one_scale({name: end}, found)[name] for end in (known[remedy].low, known[remedy].high))
            low, high = map(saved, ends)
            errors[name] = (high - low) / 2
    return errors


def _utilization(found: Findings, flops: int | None) -> float | None:
    """MFU. Source: Chowdhery et al., "PaLM", JMLR 24, 2023, appendix B."""
    ceiling = peak(found)
    if ceiling is None or flops is None or ceiling.value <= 0:
        return None
    return flops / found.anatomy.step_s / ceiling.value
