"""What does the training thread do in each phase, and how even are its steps?

In: sampled stacks, and the step times of plain windows. Out: an `Activity`: parts of the data phase by what they are
spent on, output and waiting elsewhere, the heaviest places in the script; and `SlowSteps`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flatout.judge import stats
from flatout.records.stacks import StackRow, Stacks
from flatout.records.trace import Window

ENOUGH_SAMPLES = 40
"""With fewer, shares say nothing: 40 samples know a share of a half to within 8 %."""

SLOW = 2.0
"""A step that takes so many times the median is a slow one."""

RARE = 0.25
"""Where more than this share of the steps is slow, that is not the exception."""

STALLS = 1 / 3
"""A line that does not run for so much of its time is held up, not busy: what it does besides is part of that."""

NUM_PLACES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of the script, and how much of the step passes there."""

    phase: str
    kind: str
    place: str
    step_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSteps:
    """Steps that take far longer than the usual one.

    Attributes:
        every: One step in so many is slow.
        excess_share: What they take beyond a usual step, as a share of all.
        times: How many times a usual step they take, in the median.
        phase: In which phase they take it; empty where it was not seen.
        num: How many were seen.
    """

    every: float
    excess_share: float
    times: float
    phase: str = ""
    num: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What samples of the training thread say.

    Attributes:
        num_samples: How many there were.
        data_parts: Shares of the data phase: `storage` (waiting while items are fetched), `decode`, `transform` (other
            code of the items), `collate`, `worker start-up`. Of a loader with workers they were seen without them,
            start-up apart.
        output_share: Share of the step in which the script prints, logs or serialises.
        waiting_share: Share of the step, outside of fetching, in which the thread did not run.
        stalled_share: Share of the step in lines, outside of fetching, that spend a good part of their time so.
        system_share: Share of the step in which the kernel computed for it, wherever.
        faults_per_step: Pages that had to be read from a disk, per step.
        places: The heaviest lines of the script, first.
    """

    num_samples: int
    data_parts: Mapping[str, float] = field(default_factory=dict)
    output_share: float = 0.0
    waiting_share: float = 0.0
    stalled_share: float = 0.0
    system_share: float = 0.0
    faults_per_step: float = 0.0
    places: tuple[Place, ...] = ()


def activity_of(seen: Sequence[Stacks], without_workers: Stacks | None = None) -> Activity | None:
    """What the samples say; None where there are too few.

    Args:
        seen: Of plain windows.
        without_workers: Of a window in which the items were fetched in the training process, where workers do it else.
    """
    wall_s = math.fsum(s.wall_s for s in seen)
    num_samples = sum(s.num_samples for s in seen)
    if num_samples < ENOUGH_SAMPLES or not wall_s > 0:
        return None
    rows = [row for s in seen for row in s.rows]
    outside = [row for row in rows if row.phase != "data"]
    output_s = math.fsum(row.wall_s for row in outside if row.kind == "output")
    others = [row for row in outside if row.kind != "output"]
    return Activity(
        num_samples=num_samples, data_parts=_data_parts(seen, without_workers), output_share=output_s / wall_s,
        waiting_share=math.fsum(row.waiting_s for row in others) / wall_s, stalled_share=_stalled_s(others) / wall_s,
        system_share=math.fsum(s.system_s for s in seen) / wall_s,
        faults_per_step=sum(s.major_faults for s in seen) / max(sum(s.num_steps for s in seen), 1),
        places=_places(seen, wall_s),
    )  # fmt: skip


def _stalled_s(rows: Sequence[StackRow]) -> float:
    """Seconds of the lines that wait for a good part of their time."""
    total: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        one = total[row.phase, row.place]
        one[0] += row.wall_s
        one[1] += row.waiting_s
    return math.fsum(wall_s for wall_s, waiting_s in total.values() if waiting_s >= STALLS * wall_s)


def _data_parts(seen: Sequence[Stacks], without_workers: Stacks | None) -> dict[str, float]:
    data = [row for s in seen for row in s.rows if row.phase == "data"]
    data_s = math.fsum(row.wall_s for row in data)
    if not data_s > 0:
        return {}
    start_s = min(_start_up_s(seen, data, without_workers), data_s)
    fetched = data if without_workers is None else [r for r in without_workers.rows if r.phase == "data"]
    parts = {"storage": 0.0, "decode": 0.0, "transform": 0.0, "collate": 0.0}
    names = {"decode": "decode", "collate": "collate", "code": "transform", "output": "transform"}
    for row in fetched:
        if row.kind in names:
            parts["storage"] += row.waiting_s if row.kind != "collate" else 0.0
            parts[names[row.kind]] += row.wall_s - (row.waiting_s if row.kind != "collate" else 0.0)
    total_s = math.fsum(parts.values())
    rest = 1 - start_s / data_s
    shares = {name: rest * seconds / total_s if total_s > 0 else 0.0 for name, seconds in parts.items()}
    return {**shares, "worker start-up": start_s / data_s}


def _start_up_s(seen: Sequence[Stacks], data: Sequence[StackRow], without_workers: Stacks | None) -> float:
    """Starting workers, and what batches cost beyond fetching them without any: they were not ready yet."""
    started_s = math.fsum(row.wall_s for row in data if row.kind == "workers")
    if without_workers is None or not started_s:
        return started_s
    fetching_s = without_workers.wall_of("data") / max(without_workers.num_steps, 1)
    beyond_s = math.fsum(row.wall_s for row in data) - fetching_s * sum(s.num_steps for s in seen)
    return max(started_s, beyond_s)


def _places(seen: Sequence[Stacks], wall_s: float) -> tuple[Place, ...]:
    total: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for row in (row for s in seen for row in s.rows):
        total[row.phase, row.kind, row.place] += row.wall_s
    heaviest = sorted(total.items(), key=lambda item: -item[1])[:NUM_PLACES]
    return tuple(
        Place(phase=phase, kind=kind, place=place, step_share=seconds / wall_s)
        for (phase, kind, place), seconds in heaviest
    )


def slow_steps(plain: Sequence[Window], taken_apart: Sequence[Window]) -> SlowSteps | None:
    """Steps that stand out, if they are rare and there are any.

    Args:
        plain: Windows whose step times count.
        taken_apart: Windows with phases, which say where the time of slow steps goes.
    """
    steps = _training_steps(plain)
    if len(steps) < 20:
        return None
    usual_s = stats.quantile(sorted(steps), 0.5)
    slow = [s for s in steps if s > SLOW * usual_s]
    if not slow or not usual_s > 0 or len(slow) > RARE * len(steps):
        return None
    return SlowSteps(
        every=len(steps) / len(slow), excess_share=math.fsum(s - usual_s for s in slow) / math.fsum(steps),
        times=stats.quantile(sorted(slow), 0.5) / usual_s, phase=_slow_phase(taken_apart), num=len(slow),
    )  # fmt: skip


def _training_steps(windows: Sequence[Window]) -> list[float]:
    return [s - o for w in windows for s, o in zip(w.step_s, w.outside_s, strict=True)]


def _slow_phase(windows: Sequence[Window]) -> str:
    """The phase that takes most of what slow steps take beyond usual ones."""
    steps = _training_steps(windows)
    if len(steps) < 20:
        return ""
    usual_s = stats.quantile(sorted(steps), 0.5)
    names = sorted({name for w in windows for name in w.account} - {"unattributed"})
    excess: dict[str, float] = {}
    for name in names:
        spent = [s for w in windows for s in w.account.get(name, (0.0,) * w.num_steps)]
        if len(spent) != len(steps):
            continue
        usual = stats.quantile(sorted(spent), 0.5)
        excess[name] = math.fsum(p - usual for p, s in zip(spent, steps, strict=True) if s > SLOW * usual_s)
    total = math.fsum(s - usual_s for s in steps if s > SLOW * usual_s)
    excess["unattributed"] = total - math.fsum(excess.values())
    return max(excess, key=lambda name: excess[name]) if total > 0 else ""
