"""What can hold a step back, and how much faster would it be without each?

In: `Findings`. Out: for each cause how many times as fast the step would be without it, on one scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatout.judge import stats
from flatout.judge.findings import (
    Findings,
    assumed_s,
    believed,
    fixed_share,
    model_s,
    peak,
    phase_s,
    uninterrupted,
    with_checkpoints_s,
    without,
)

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

FAULTS = 1.0
"""From so many pages a step that had to be read from a disk, waiting is called paging."""

OF_THE_MODEL = ("compute", "launch overhead", "memory bandwidth")
"""How the model's time is called, by what it mostly is; what it is worth is all of that time."""

MIN_WINDOWS = 3

NORMAL_BY_SPREAD = 1.4826
"""Standard deviation over half the interquartile range, of normal noise."""

FAULT_S = 50e-6
"""What reading a page takes at the least, part of it computing in the kernel: a fast drive answers in 20 to 100 µs."""


def causes(found: Findings) -> dict[str, float]:
    """Each cause that can hold a step back, and how many times as fast the step would be without it."""
    return {
        "input": believed(found.counterfactuals.get("free_data"), uninterrupted(phase_s(found, "data"), found)),
        "optimizer": without(phase_s(found, "optimizer"), found),
        "host synchronisation": without(phase_s(found, "sync"), found),
        # What the step would gain if the model itself cost nothing, on the same scale as the other causes.
        model_cause(found): without(model_s(found) + phase_s(found, "loss"), found),
        **{
            name: uninterrupted(seconds, found, with_checkpoints_s(found) if name == "checkpoints" else None)
            for name, seconds in interruptions(found).items()
        },
    }


def interruptions(found: Findings) -> dict[str, float]:
    """Seconds of a mean step that each cause takes which is seen as it is."""
    return {
        "checkpoints": found.anatomy.outside_s.get("checkpoint", 0.0),
        "garbage collection": phase_s(found, "garbage"),
        **_outside_of_phases(found),
    }


def on_one_scale(worth: Mapping[str, float], found: Findings) -> dict[str, float]:
    """The same where checkpoints lie between steps: what each cause is worth of all the time, theirs included."""
    step_s, all_s = found.anatomy.step_s, with_checkpoints_s(found)
    return {
        name: ratio if name == "checkpoints" else all_s / (all_s - step_s * saved(ratio))
        for name, ratio in worth.items()
    }


def _outside_of_phases(found: Findings) -> dict[str, float]:
    """What is known of the time that no phase explains, each second blamed once."""
    step_s = found.anatomy.step_s
    rest_s = max(phase_s(found, "unattributed"), 0.0)
    activity, slow = found.activity, found.slow_steps
    output_s = activity.output_share * step_s if activity is not None else 0.0
    waiting_s = activity.waiting_share * step_s if activity is not None else 0.0
    faults = activity.faults_per_step if activity is not None else 0.0
    system_s = activity.system_share * step_s if activity is not None else 0.0
    stalled_s = activity.stalled_share * step_s if activity is not None else 0.0  # what else they do, nobody can tell
    paging_s = max(waiting_s + system_s, stalled_s, faults * FAULT_S) if faults >= FAULTS else 0.0
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
    seconds = interruptions(found)
    errors = _seen_errors(seconds, found)
    whole_s = {"checkpoints": with_checkpoints_s(found)}
    return {
        name: math.hypot(error, assumed_s(seconds[name], found) / whole_s.get(name, found.anatomy.step_s))
        for name, error in errors.items()
    }


def _seen_errors(seconds: Mapping[str, float], found: Findings) -> dict[str, float]:
    activity, slow = found.activity, found.slow_steps
    seen = {"garbage collection": "garbage", "own code": "unattributed", "checkpoints": "checkpoint"}
    errors = {cause: phase_error(found, name) for cause, name in seen.items()}
    if activity is not None and activity.num_samples:
        for name in ("logging", "paging"):
            share = min(seconds[name] / found.anatomy.step_s, 1.0)
            errors[name] = 1.96 * math.sqrt(share * (1 - share) / activity.num_samples)
    if slow is not None and slow.num:
        errors["slow steps"] = 1.96 * slow.excess_share * (1 - slow.excess_share) / math.sqrt(slow.num)
    return errors


def phase_error(found: Findings, name: str) -> float:
    """Half of the 95 % interval of a phase's share, from its scatter between windows; NaN with fewer than three."""
    scatter = found.anatomy.spread_fraction.get(name, math.nan)
    num = found.anatomy.num_windows
    if num < MIN_WINDOWS:
        return math.nan
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
    share, launches = fixed_share(found), _launch_share(found)
    if share is None:
        share = launches
    elif launches is not None:  # weights that are read anew do not shrink with the batch either
        share = min(share, DEAREST_START * launches)
    if share is not None and share >= FIXED_SHARE:
        return "launch overhead"
    return "memory bandwidth" if _memory_bound_share(found) > 0.5 else "compute"


def _launch_share(found: Findings) -> float | None:
    """Number of operations times the measured cost of starting one, over the time of the model; None if not known."""
    launch = found.ceilings.get("kernel_launch") if found.ceilings else None
    if launch is None or found.census is None or model_s(found) <= 0:
        return None
    return found.census.num_operations * launch.value / model_s(found)


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
