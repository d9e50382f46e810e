"""What can hold a step back, and how much faster would it be without each?

In: the anatomy, the census of one step, samples, counterfactuals, ceilings: `Findings`. Out: for each cause how many
times as fast the step would be without it, on one scale. Arithmetic alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flatout.judge import stats
from flatout.judge.activity import Activity, SlowSteps
from flatout.judge.anatomy import Account, Anatomy
from flatout.judge.profiled_time import ALLOCATION, COPIES, PYTHON, SYNC, ProfiledTime
from flatout.judge.stats import Comparison
from flatout.records.ceilings import Ceiling, Ceilings
from flatout.records.facts import Facts
from flatout.records.trace import Census, Scaling

COMPUTING = ("forward", "loss", "backward", "optimizer")

BETWEEN = {"evaluation": "evaluation", "checkpoints": "checkpoint"}
"""Causes that lie between steps, each with its phase: what they are worth is of all the time."""

REMEDIED = {"debug switches": "debugging_off", "interpreter": "free_interpreter"}
"""Causes that are known by trying the step without them alone, which lies in its phases, and how that is called."""

SHORTEST_BACK_TO_BACK = 2 / 3
"""Of its time in a step, what computing is believed to take back to back at the least; seen on CPUs: 0.75 to 1."""

WORTHWHILE = 1.1
"""A remedy whose bound is lower than this does not name the bottleneck."""

ALIKE = 0.75
"""A cause, or a part of fetching, that takes this share of the largest one's time is named beside it.

Sampled 300 times, two equal parts of fetching come out at 0.8 or less in one case of 20.
"""

FIXED_SHARE = 0.5
"""Share of the model's time that does not shrink with the batch, from which on starting operations is what costs."""

DEAREST_START = 12.0
"""Starting an operation in a training step, with Python's modules and autograd, costs up to so many bare ones."""

FAIR_RATE = 0.25
"""Share of the bandwidth ceiling from which on an operation counts as moving data."""

WORTH_TAKING = 0.05
"""Workers take the cores of the model from this share of the step on."""

FAULTS = 1.0
"""From so many pages a step that had to be read from a disk, waiting is called paging."""

MIN_WINDOWS = 3

NORMAL_BY_SPREAD = 1.4826
"""Standard deviation over half the interquartile range, of normal noise."""

FAULT_S = 50e-6
"""What reading a page takes at the least, part of it computing in the kernel: a fast drive answers in 20 to 100 µs."""


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
    profiled: ProfiledTime | None = None


def arithmetic_of(facts: Facts, census: Census | None = None) -> str:
    """The width of floats in which the script multiplies; of the script's own half precision only the kind is known.

    On a GPU `autocast` may mean float16 or bfloat16, which run at one rate. With a census it is that of most of its
    FLOPs, where convolutions are computed in another one than products.
    """
    if census is not None and 2 * census.convolution_flops > census.flops + census.recomputed_flops:
        return _convolves_in(facts)
    dtypes = {dtype for model in facts.models for dtype in model.dtypes}
    if facts.autocast or (dtypes and dtypes <= {"bfloat16", "float16"}):
        return "float16" if dtypes == {"float16"} else "bfloat16"
    return "tf32" if facts.device == "cuda" and facts.matmul_precision != "highest" else "float32"


def _convolves_in(facts: Facts) -> str:
    """The same for convolutions: cuDNN takes TF32 for float32 unless it is told not to, products do not."""
    products = arithmetic_of(facts)
    return "tf32" if products == "float32" and facts.convolution_tf32 else products


def peak(found: Findings) -> Ceiling | None:
    """The ceiling of the script's own arithmetic; float16 runs at bfloat16's rate where only that was measured.

    Where convolutions are computed in another one than products, it is the rate at which both together would run.
    """
    if found.ceilings is None:
        return None
    arithmetic, census = arithmetic_of(found.facts), found.census
    products = found.ceilings.peak(arithmetic) or (found.ceilings.peak("bfloat16") if arithmetic == "float16" else None)
    if census is None or not census.convolution_flops or _convolves_in(found.facts) == arithmetic:
        return products
    images = found.ceilings.peak(_convolves_in(found.facts))
    if products is None or images is None:
        return None
    share = census.convolution_flops / (census.flops + census.recomputed_flops)
    return replace(images, value=1 / (share / images.value + (1 - share) / products.value))


def without(seconds: float, found: Findings, all_s: float | None = None) -> float:
    """How many times as fast the step, or `all_s`, would be without these seconds of it, at most a thousand times."""
    all_s = found.anatomy.step_s if all_s is None else all_s
    return max(all_s / max(all_s - seconds, all_s * 1e-3), 1.0)


def between_s(found: Findings, cause: str) -> float:
    """Seconds of a mean step's part of a cause that lies between steps."""
    return found.anatomy.outside_s.get(BETWEEN[cause], 0.0)


def phase_s(found: Findings, name: str) -> float:
    """Seconds of a phase in a mean step; 0 where it was not observed."""
    return found.anatomy.phases_s.get(name, 0.0)


def model_s(found: Findings) -> float:
    """Seconds of the model itself, forward and backward."""
    return sum(found.anatomy.phases_s.get(name, 0.0) for name in ("forward", "backward"))


def device_idle_s(found: Findings, *causes: str, phases: Iterable[str] | None = None) -> float:
    """Seconds of a step in which a device idles for these causes; 0 where none was profiled."""
    seen = found.profiled
    return seen.idle_s(*causes, phases=phases) if seen is not None and seen.on_device else 0.0


def launching_s(found: Findings) -> float | None:
    """Seconds of a step in which a device idles until Python launches its next kernel; None where none was profiled.

    Profiling makes launches longer, and nothing else: what it made the step longer by is taken off.
    """
    seen = found.profiled
    if seen is None or not seen.on_device:
        return None
    return max(seen.idle_s(PYTHON, phases=COMPUTING) - max(seen.step_s - found.anatomy.step_s, 0.0), 0.0)


def sync_s(found: Findings) -> float:
    """Seconds of a step that waiting for single values takes, or leaves a device idle, whichever is more."""
    return max(phase_s(found, "sync"), device_idle_s(found, SYNC))


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
    computing_s = sum(phase_s(found, name) for name in COMPUTING)
    all_s = found.anatomy.step_s + between_s(found, "checkpoints")  # an evaluation computes itself
    interrupted_s = all_s - computing_s
    if interrupted_s <= 0:
        return 0.0
    left_s = max(min(computing_s, all_s - saved_s), 0.0)
    return (1 - back_to_back(found)) * left_s * min(saved_s / interrupted_s, 1.0)


def assumed_s(saved_s: float, found: Findings) -> float:
    """Of `eased_s` what was not replayed, but is taken to gain as much as the model's calls."""
    computing_s = sum(phase_s(found, name) for name in COMPUTING)
    unplayed_s = phase_s(found, "loss") + phase_s(found, "optimizer")
    return eased_s(saved_s, found) * unplayed_s / computing_s if computing_s > 0 else 0.0


def uninterrupted(saved_s: float, found: Findings, all_s: float | None = None) -> float:
    """How many times as fast the step would be without an interruption, and with what that lets be quicker.

    Args:
        saved_s: What the interruption takes of a mean step.
        found: For what is quicker back to back.
        all_s: What that is a part of, where that is not the step.
    """
    return without(saved_s + eased_s(saved_s, found), found, all_s)


def fixed_share(found: Findings) -> float | None:
    """Share of the time of a step's model calls that does not shrink with the batch.

    With t(b) = fixed + b c follows fixed = 2 t(b/2) - t(b).
    """
    if found.scaling is None or not found.scaling.full_s or not found.scaling.half_s or model_s(found) <= 0:
        return None
    full = stats.summarize(found.scaling.full_s).median
    half = stats.summarize(found.scaling.half_s).median
    return min(max((2 * half - full) / full, 0.0), 1.0) if full > 0 else None


def believed(counterfactual: Comparison | None, otherwise: float) -> float:
    """The measured gain where it is sure, else what is known otherwise as far as the interval admits it."""
    if counterfactual is None or not math.isfinite(counterfactual.ratio):
        return otherwise
    if counterfactual.verdict != "inconclusive":
        return counterfactual.ratio
    return min(max(otherwise, counterfactual.low), counterfactual.high)


def cores_taken_s(found: Findings) -> float:
    """Seconds of a step that fetching takes elsewhere in it: workers that have the cores of the model.

    That is what a step without fetching was surely measured to be shorter by, beyond the time in which it waits.
    """
    free = found.counterfactuals.get("free_data")
    if free is None or free.verdict != "faster" or not any(loader.num_workers for loader in found.facts.loaders):
        return 0.0
    share = saved(free.low) - phase_s(found, "data") / found.anatomy.step_s
    return share * found.anatomy.step_s if share >= WORTH_TAKING else 0.0


def held_s(found: Findings) -> float:
    """Seconds of a step in which the training thread did not run, as far as other Python threads computed meanwhile."""
    waiting = found.activity.waiting_share if found.activity is not None else 0.0
    return min(waiting, sum(one.cpu_fraction for one in found.facts.busy_threads)) * found.anatomy.step_s


def causes(found: Findings) -> dict[str, float]:
    """Each cause that can hold a step back, and how many times as fast the step would be without it."""
    seen = {"interpreter": without(held_s(found), found)}
    remedied = {
        cause: believed(found.counterfactuals.get(name), seen.get(cause, 1.0)) for cause, name in REMEDIED.items()
    }
    others_s = cores_taken_s(found) + sum(saved(ratio) for ratio in remedied.values()) * found.anatomy.step_s
    others_s += device_idle_s(found, PYTHON, SYNC, COPIES, ALLOCATION, phases=("forward", "loss", "backward"))
    own_s = max(model_s(found) + phase_s(found, "loss") - others_s, 0.0)
    launches_s = launching_s(found)
    return {
        **remedied,
        "input": believed(found.counterfactuals.get("free_data"), uninterrupted(phase_s(found, "data"), found)),
        "optimizer": without(phase_s(found, "optimizer"), found),
        "host synchronisation": without(sync_s(found), found),
        **({} if launches_s is None else {"launch overhead": without(launches_s, found)}),
        # What the step would gain if the model itself cost nothing, on the same scale as the other causes.
        model_cause(found): without(own_s, found),
        "evaluation": without(between_s(found, "evaluation"), found, found.anatomy.all_s),
        **{
            name: uninterrupted(seconds, found, found.anatomy.all_s if name in BETWEEN else None)
            for name, seconds in interruptions(found).items()
        },
    }


def interruptions(found: Findings) -> dict[str, float]:
    """Seconds of a mean step that each cause takes which is seen as it is."""
    return {
        "checkpoints": between_s(found, "checkpoints"),
        "garbage collection": phase_s(found, "garbage"),
        "copies": max(phase_s(found, "copy"), device_idle_s(found, COPIES)),
        "allocation": device_idle_s(found, ALLOCATION),
        **_outside_of_phases(found),
    }


def on_one_scale(worth: Mapping[str, float], found: Findings) -> dict[str, float]:
    """The same where something lies between steps: what each cause is worth of all the time, that included."""
    step_s, all_s = found.anatomy.step_s, found.anatomy.all_s
    return {
        name: ratio if name in BETWEEN else all_s / (all_s - step_s * saved(ratio)) for name, ratio in worth.items()
    }


def _outside_of_phases(found: Findings) -> dict[str, float]:
    """What is known of the time that no phase explains, each second blamed once."""
    step_s, activity, slow = found.anatomy.step_s, found.activity or Activity(num_samples=0), found.slow_steps
    rest_s = max(phase_s(found, "unattributed") - device_idle_s(found, SYNC, COPIES, phases=("unattributed",)), 0.0)
    output_s, waiting_s = activity.output_share * step_s, activity.waiting_share * step_s
    if found.anatomy.host_s:  # what Python does while a device works costs nothing
        output_s, waiting_s = min(output_s, rest_s), min(waiting_s, rest_s)
    paging_s = 0.0
    if activity.faults_per_step >= FAULTS:  # what else lines do that stall, nobody can tell
        stalled_s, faults_s = activity.stalled_share * step_s, activity.faults_per_step * FAULT_S
        paging_s = max(waiting_s + activity.system_share * step_s, stalled_s, faults_s)
    paging_s = min(paging_s, rest_s + waiting_s)
    slow_s = slow.excess_share * step_s if slow is not None and slow.phase != "data" else 0.0
    slow_s = max(slow_s - phase_s(found, "garbage"), 0.0)
    if output_s >= slow_s:  # what is slow now and then has a better name
        slow_s = 0.0
    in_rest_s = slow_s if slow is not None and slow.phase in ("unattributed", "") else 0.0  # "": it was not seen where
    own_s = max(rest_s - min(output_s, rest_s) - in_rest_s - min(paging_s, rest_s), 0.0)
    return {"logging": output_s, "paging": paging_s, "slow steps": slow_s, "own code": own_s}


def share_errors(found: Findings) -> dict[str, float]:
    """Half of the 95 % interval of what would be gone without an interruption, as a share of what it is a part of."""
    activity, slow, seconds, step_s = found.activity, found.slow_steps, interruptions(found), found.anatomy.step_s
    seen = {"garbage collection": "garbage", "own code": "unattributed", "copies": "copy"}
    errors = {cause: phase_error(found, name) for cause, name in seen.items()}
    errors |= {cause: 1.96 * found.anatomy.spread_fraction.get(name, math.nan) for cause, name in BETWEEN.items()}
    if activity is not None and activity.num_samples:
        for name in ("logging", "paging"):
            share = min(seconds[name] / step_s, 1.0)
            errors[name] = 1.96 * math.sqrt(share * (1 - share) / activity.num_samples)
    if slow is not None and slow.num:
        errors["slow steps"] = 1.96 * slow.excess_share * (1 - slow.excess_share) / math.sqrt(slow.num)
    whole_s = dict.fromkeys(BETWEEN, found.anatomy.all_s)
    return {
        name: math.hypot(error, assumed_s(seconds.get(name, 0.0), found) / whole_s.get(name, step_s))
        for name, error in errors.items()
    }


def phase_error(found: Findings, name: str) -> float:
    """Half of the 95 % interval of a phase's share, from its scatter between windows; NaN with fewer than three."""
    num = found.anatomy.num_windows
    if num < MIN_WINDOWS:
        return math.nan
    scatter = found.anatomy.spread_fraction.get(name, math.nan)
    return stats.student(num - 1, 0.95) * NORMAL_BY_SPREAD * scatter / math.sqrt(num)


def saved(ratio: float) -> float:
    """The share of the time that is gone where the rest is so many times as fast."""
    return 1 - 1 / ratio


def nearly_as_large(ratio: float, largest: float) -> bool:
    """Does a cause take about as much time as the largest? Both are given by what is to be had without them."""
    return saved(ratio) >= ALIKE * saved(largest)


def data_parts(found: Findings) -> tuple[str, ...]:
    """The part of fetching that takes most of it, and those nearly as large; none where it was not seen."""
    parts = found.activity.data_parts if found.activity is not None else {}
    largest = max(parts.values(), default=0.0)
    alike = [name for name in parts if parts[name] > 0 and parts[name] >= ALIKE * largest]
    return tuple(sorted(alike, key=lambda name: -parts[name]))


def model_cause(found: Findings) -> str:
    """What holds the model itself back."""
    share = None if launching_s(found) is not None else fixed_share(found)  # then launches are a cause of their own
    launch = found.ceilings.get("kernel_launch") if found.ceilings else None
    if launching_s(found) is None and launch is not None and found.census is not None and model_s(found) > 0:
        launches = found.census.num_operations * launch.value / model_s(found)
        # weights that are read anew do not shrink with the batch either
        share = launches if share is None else min(share, DEAREST_START * launches)
    if share is not None and share >= FIXED_SHARE:
        return "launch overhead"
    return "memory bandwidth" if _memory_bound_share(found) > 0.5 else "compute"


def _memory_bound_share(found: Findings) -> float:
    """Share of the operations' time in those left of the roofline's ridge that do move data at a fair part of its rate.

    A tiny operation lies left of the ridge too, but what it waits for is its own start. On a GPU an operation's own
    time on the host says nothing: there its time is what the roofline gives it.
    """
    bandwidth = found.ceilings.get("memory_copy") if found.ceilings else None
    ceiling = peak(found)
    if found.census is None or ceiling is None or bandwidth is None:
        return 0.0
    ridge = ceiling.value / bandwidth.value
    total_s = moving_s = 0.0
    for op in found.census.operations:
        seconds = op.self_s
        if found.facts.device != "cpu":
            seconds = max(op.flops / ceiling.value, op.moved_bytes / bandwidth.value)
        total_s += seconds
        if op.flops < ridge * max(op.moved_bytes, 1) and op.moved_bytes >= FAIR_RATE * bandwidth.value * seconds:
            moving_s += seconds
    return moving_s / total_s if total_s > 0 else 0.0
