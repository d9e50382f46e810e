"""Which limit binds, how sure is that, and what can a remedy bring at most?

In: `Findings`: the anatomy, the census of one step, measured counterfactuals and the machine's ceilings. Out: a
`Diagnosis` that names what binds with its evidence, and a bound for each remedy, measured before anything was tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.judge import stats
from flatout.judge.causes import (
    BETWEEN,
    REMEDIED,
    WORTHWHILE,
    Findings,
    arithmetic_of,
    assumed_s,
    believed,
    between_s,
    causes,
    cores_taken_s,
    data_parts,
    fixed_share,
    interruptions,
    launching_s,
    model_s,
    nearly_as_large,
    on_one_scale,
    peak,
    phase_error,
    phase_s,
    saved,
    share_errors,
    sync_s,
    uninterrupted,
    without,
)
from flatout.judge.remedies import CAUSES, EASED, MEASURED, OF_THE_MODEL, PARTS, PROFILED, REMEDIES, SHARE
from flatout.judge.stats import Comparison

#: What can bind.
BINDINGS = (*CAUSES, "nothing")

NOT_CONCLUDED = "not concluded"
"""Instead of what binds, where measurements of the same step contradict each other."""

WORTH_A_ROW = 1.05
"""A cause that few scripts have is among the bounds from here on."""

COUNTED_TWICE = 0.01
"""Phases that exceed the step by more than this share of it are an error of ours, and said."""

WORTH_A_PLACE = 0.05
"""A line of the script is named from this share of the step on."""

MAY_BE = "perhaps another thread of the script holds the interpreter, or others used the machine"
"""Why the step may take another time when it is looked at."""

MOST_CAUSES = 3
"""Of what leaves a device idle, the largest."""

HIDDEN = 0.05
"""From this share on it is said what may hide in the time that no phase explains."""


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
    contradictions = tuple(_contradictions(found))
    binding = _binding(found, worth)
    held = found.counterfactuals.get(REMEDIED["interpreter"])
    if contradictions and held is not None and held.ratio >= WORTHWHILE:  # steps of many lengths, and no wonder
        binding = "interpreter"
    also = () if contradictions else _not_told_apart(binding, worth, _errors(bounds, found))
    phase = CAUSES[binding].phase if binding in CAUSES else ""
    share = found.anatomy.share(phase)
    best = sorted(bounds, key=lambda b: b.remedy != REMEDIES.get(binding))[:2]  # its own remedy's, then the largest
    parts = data_parts(found) if "input" in (binding, *also) else ()
    flops = found.census.flops if found.census and found.census.flops else None
    utilization = _utilization(found, flops)
    named = Diagnosis(
        binding=binding,
        part=parts[0] if parts else "",
        also=(*also, *parts[1:]),
        sentence="; ".join([_sentence(binding, parts, found), *_beside(binding, also, worth)]),
        evidence=(
            *([f"{phase} takes {100 * share:.0f} % of the step"] if share is not None else []),
            *_ties(binding, also, worth),
            *(f"{bound.remedy}: at most {bound.ratio:.2f}x ({bound.how})" for bound in best),
            *_evidence(binding, found),
        ),
        bounds=bounds,
        model_flops_per_step=flops,
        achieved_flops_per_s=flops / found.anatomy.step_s if flops else None,
        model_flops_utilization=utilization,
        notes=tuple(_notes(found, utilization)),
        arithmetic=arithmetic_of(found.facts, found.census),
    )
    return _not_concluded(named, contradictions) if contradictions else named


def _not_concluded(named: Diagnosis, contradictions: tuple[str, ...]) -> Diagnosis:
    """Without what rests on the step that was taken apart; what was measured in pairs with plain does not."""
    paired = (b for b in named.bounds if any((b.remedy, b.how) == known[:2] for known in MEASURED.values()))
    rest = replace(
        named, part="", also=(), evidence=contradictions, bounds=tuple(paired), achieved_flops_per_s=None,
        model_flops_utilization=None, contradictions=contradictions,
    )  # fmt: skip
    if named.binding in ("thread oversubscription", "interpreter"):  # so was this
        return rest
    return replace(rest, binding=NOT_CONCLUDED, sentence=f"{NOT_CONCLUDED}: {'; '.join(contradictions)}", evidence=())


def _bounds(found: Findings, worth: Mapping[str, float]) -> list[Bound]:
    known = {name: c for name, c in found.counterfactuals.items() if math.isfinite(c.ratio)}
    result = [_measured(known[name], *MEASURED[name]) for name in MEASURED if name in known]
    data = found.anatomy.phases_s.get("data")
    if "free_data" not in known and data is not None:
        error = math.hypot(phase_error(found, "data"), assumed_s(data, found) / found.anatomy.step_s)
        ratio = uninterrupted(data, found)
        result.append(_of_share("free data", ratio, error, _said(SHARE, ratio, data, found), ("data",)))
    nan, fixed = float("nan"), fixed_share(found)
    launches_s, launched = None if fixed is None else fixed * model_s(found), "model calls replayed at half the batch"
    seen = found.profiled if found.profiled is not None and found.profiled.on_device else None
    if seen is not None:
        launches_s, launched = launching_s(found), f"{PROFILED}: the device waited for them"
        ratio = without(found.anatomy.step_s - seen.busy_s, found)
        result.append(_of_share("a device that is never idle", ratio, nan, PROFILED, ()))
    waits_s = sync_s(found) if seen is not None else found.anatomy.phases_s.get("sync")
    seconds = (
        ("free launches", launches_s, nan, launched, ("forward", "backward", "loss")),
        ("free optimizer", found.anatomy.phases_s.get("optimizer"), phase_error(found, "optimizer"),
         SHARE, ("optimizer",)),
        ("no host synchronisation", waits_s, phase_error(found, "sync"),
         SHARE if seen is None else PROFILED, ("sync",)),
        ("compute at its dtype's ceiling", _compute_slack_s(found), nan, "the step's FLOPs at the measured ceiling",
         ("forward", "backward")),
    )  # fmt: skip
    for remedy, saved_s, error, how, shortens in seconds:
        if saved_s is not None:
            result.append(_of_share(remedy, without(saved_s, found), error, how, shortens))
    errors, lost_s = share_errors(found), interruptions(found)
    for name, cause in CAUSES.items():
        if cause.how and worth[name] >= WORTH_A_ROW:
            how = _said(cause.how, worth[name], lost_s.get(name, 0.0), found)
            result.append(_of_share(cause.remedy, worth[name], errors.get(name, nan), how, cause.shortens))
    return result


def _said(how: str, ratio: float, saved_s: float, found: Findings) -> str:
    """How a bound is known, and whether more than the share itself is in it."""
    return EASED if how == SHARE and saved(ratio) > saved(without(saved_s, found)) + 0.005 else how


def _of_share(remedy: str, ratio: float, error: float, how: str, shortens: tuple[str, ...]) -> Bound:
    """A bound that follows from a share of the step; its interval from that share's own."""
    share = saved(ratio)
    low, high = (1 / max(1 - max(share + side * error, 0.0), 1e-3) for side in (-1, 1))
    return Bound(remedy=remedy, ratio=ratio, low=low, high=high, how=how, shortens=shortens)


def _measured(comparison: Comparison, remedy: str, how: str, shortens: tuple[str, ...]) -> Bound:
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
    if any(worth[name] >= WORTHWHILE for name in REMEDIED):  # of the model's own time nobody gets as much
        worth = {name: ratio for name, ratio in worth.items() if name not in OF_THE_MODEL}
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


# -- how it is said ---------------------------------------------------------------------------------------------------


def _contradictions(found: Findings) -> list[str]:
    """Measurements of the same thing that differ by more than a cause must be worth to be named, and why perhaps."""
    lines = [
        f"a step takes {_step(account.plain_s)} in plain windows and {_step(account.other_s)} where it is {looked}"
        for looked, account in found.accounts.items()
        if account.is_open(WORTHWHILE)
    ]
    lines += [MAY_BE] if lines else []
    twice = -(found.anatomy.share("unattributed") or 0.0)
    if twice > WORTHWHILE - 1:  # in the same windows: no noise
        lines.append(f"the phases sum to {_percent(twice)} more than the step: something was counted twice")
    return lines


def _step(seen_s: Sequence[float]) -> str:
    """Seconds of a step, and half the interquartile range between windows, where there are several."""
    found = stats.summarize(seen_s)
    step = f"{found.median:.3g} s" if found.median >= 1 else f"{1e3 * found.median:.3g} ms"
    return f"{step} ± {_percent(found.spread_fraction)}" if found.num > 1 else f"{step} (one window)"


def _sentence(binding: str, parts: Sequence[str], found: Findings) -> str:
    """What binds, in one sentence."""
    if binding == "nothing":
        return _nothing(found)
    said, slow = CAUSES[binding].sentence, found.slow_steps
    if binding in BETWEEN:
        return f"{binding}: {said}, {_percent(between_s(found, binding) / found.anatomy.all_s)} of the time"
    if binding == "input":
        workers = max((loader.num_workers for loader in found.facts.loaders), default=0)
        taken = cores_taken_s(found) > phase_s(found, "data")
        by = f"by {workers} workers that do not keep up" if workers else "item by item in the training process"
        if workers and taken:
            return f"{binding}: {workers} workers on {found.num_cores} cores take them from the model"
        mostly = f"; mostly {' and '.join(parts)}: {'; '.join(PARTS[part] for part in parts)}" if parts else ""
        said = f"batches are built {by} while the model waits{mostly}"
    elif binding == "thread oversubscription":
        said = f"{found.facts.num_threads} threads on {found.num_cores} cores"
    elif binding == "debug switches":
        said = f"each step pays for {' and '.join(found.facts.debug_switches)}"
    elif binding == "interpreter":
        threads = [
            f"`{one.name}` at `{one.place}` ({_percent(one.cpu_fraction)} of a core)"
            for one in found.facts.busy_threads
        ]
        said = f"training waits for its turn in Python, where another thread never sleeps: {', '.join(threads)}"
    elif binding == "slow steps" and slow is not None:
        where = f", mostly in {slow.phase}" if slow.phase else ""
        said = f"one in {slow.every:.0f} takes {slow.times:.1f} times as long as the usual one{where}"
    return f"{binding}: {said}"


def _nothing(found: Findings) -> str:
    """No cause that is known; a large part that belongs to none of them is said."""
    name, seconds = max(found.anatomy.phases_s.items(), key=lambda item: item[1], default=("", 0.0))
    if without(seconds, found) < WORTHWHILE:
        return "nothing: no single cause, freed entirely, would bring 10 %"
    share = f"{_percent(seconds / found.anatomy.step_s)} of the step"
    if name == "unattributed":
        return f"nothing that can be named: {share} lies outside every phase that was seen"
    return f"nothing that can be named: {share} is `{name}`"


def _beside(binding: str, also: Sequence[str], worth: Mapping[str, float]) -> list[str]:
    """The same causes in a few words, to stand behind the sentence that names what binds."""
    found = []
    for said, nearly in (("nearly", True), ("perhaps", False)):
        names = [name for name in also if nearly_as_large(worth[name], worth[binding]) == nearly]
        if names:
            found.append(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {said} as large")
    return found


def _ties(binding: str, also: Sequence[str], worth: Mapping[str, float]) -> list[str]:
    """Causes that are nearly as large as what binds, or whose intervals leave open which is larger."""
    lines = []
    for name in also:
        near = "is nearly" if nearly_as_large(worth[name], worth[binding]) else "may be"
        this = "the model's own time" if name in OF_THE_MODEL else "it"
        that = "the model's own time" if binding in OF_THE_MODEL else binding
        lines.append(f"{name} {near} as large: {worth[name]:.2f}x without {this}, {worth[binding]:.2f}x without {that}")
    return lines


def _evidence(binding: str, found: Findings) -> list[str]:
    """Further measurements that say so."""
    lines, activity = [], found.activity
    shares = {name: seconds / found.anatomy.step_s for name, seconds in found.anatomy.not_trained_s.items()}
    lines += [
        f"`{name}` that is not trained takes {_percent(share)} of the step"
        for name, share in shares.items()
        if share >= WORTH_A_PLACE
    ]
    if host_s := found.anatomy.host_s:
        name, seconds = max(host_s.items(), key=lambda item: item[1])
        lines.append(f"Python meanwhile was in {name} for {_percent(seconds / math.fsum(host_s.values()))} of its time")
    lines += _idle(found)
    if activity is not None:
        parts = sorted(activity.data_parts.items(), key=lambda item: -item[1])
        said = [f"{name} {_percent(share)}" for name, share in parts if share >= WORTH_A_PLACE]
        lines += [f"of fetching: {', '.join(said)} (sampled)"] if said and binding == "input" else []
        is_there = {
            "input": [p.phase == "data" and p.kind != "queue" for p in activity.places],
            "logging": [p.kind == "output" for p in activity.places],
            "own code": [p.phase == "unattributed" for p in activity.places],
            "paging": [p.phase != "data" for p in activity.places],
        }.get(binding, [])
        places = [
            p for p, there in zip(activity.places, is_there, strict=False) if there and p.step_share >= WORTH_A_PLACE
        ]
        lines += [f"{_percent(p.step_share)} of the step at `{p.place}`" for p in places[:1]]
    fixed = fixed_share(found)
    if fixed is not None and binding in OF_THE_MODEL:
        lines.append(f"{_percent(fixed)} of the model's time does not shrink with the batch")
    if found.census is not None:
        operations, reads = found.census.num_operations, found.census.num_syncs
        lines.append(f"{operations:,} operation{'' if operations == 1 else 's'} a step")
        if reads:
            waits = "on a CPU that waits for nothing" if found.facts.device == "cpu" else "each waits for the device"
            values = "value" if reads == 1 else "values"
            lines.append(f"{reads:,} {values} read back a step (`.item()` and the like); {waits}")
    if found.facts.num_threads > found.num_cores:
        lines.append(f"{found.facts.num_threads} threads on {found.num_cores} cores")
    return lines


def _idle(found: Findings) -> list[str]:
    """What a device that was profiled waits for."""
    seen = found.profiled
    if seen is None or not seen.on_device:
        return []
    why = ", ".join(f"{name} {_percent(lost / seen.step_s)}" for name, lost in [*seen.by_cause.items()][:MOST_CAUSES])
    never = f"never idle: at most {without(found.anatomy.step_s - seen.busy_s, found):.2f}x"
    return [
        f"the device computes {_percent(seen.busy_share)} of a profiled step; idles for: {why or 'nothing'}; {never}"
    ]


def _notes(found: Findings, utilization: float | None) -> list[str]:
    """What the reader must know."""
    lines = []
    if utilization is not None and utilization > 1:
        lines.append(
            f"a utilization of {_percent(utilization)} is impossible: the ceiling was measured too low, "
            "or the work was overcounted: measure again on a quiet machine, `flatout machine --refresh`"
        )
    rest = found.anatomy.share("unattributed")
    if rest is not None and rest < -COUNTED_TWICE:
        lines.append(f"the phases sum to {_percent(-rest)} more than the step: something was counted twice")
    if rest is not None and rest > HIDDEN:
        places = [p for p in found.activity.places if p.phase == "unattributed"] if found.activity is not None else []
        there = ", ".join(f"`{p.place}` {_percent(p.step_share)}" for p in places[:2])
        where = f"; sampled there: {there}" if there else ""
        lines.append(f"{_percent(rest)} of the step is in no phase: the script's own lines between the parts{where}")
    if found.census is not None and found.census.uncounted:
        lines.append("no FLOP formula for: " + ", ".join(f"`{name}`" for name in found.census.uncounted[:6]))
    free_data, share = found.counterfactuals.get("free_data"), found.anatomy.share("data")
    seen = without(phase_s(found, "data"), found)
    if free_data is not None and share is not None and free_data.low > WORTHWHILE * seen:
        workers = any(loader.num_workers for loader in found.facts.loaders)
        who = "workers that fetch take cores" if workers else "fetching takes caches and memory"
        more = f"free data would bring more than the {_percent(share)} that `data` takes"
        lines.append(f"{more}: {who} from the rest of the step")
    if found.facts.set_from_outside:
        lines.append(f"set for the process, and may slow each step: {', '.join(found.facts.set_from_outside)}")
    if found.anatomy.not_observed:
        lines.append("not observed: " + ", ".join(found.anatomy.not_observed))
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
