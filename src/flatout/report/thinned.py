"""Which steps of a long timeline are drawn? So few that the page stays small, so chosen that nothing unusual is lost.

In: steps with their times. Out: some of them. Of each narrow slice of time and each kind the fastest and the slowest
step stay, and a few between. A step far above its kind's others stays as well; of more than `MOST_OUTLIERS` such steps
the slowest stay. Only the drawing is thinned, the numbers beside it are not.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.judge.result import Result, TimelineStep

Kind = Literal["plain", "plan", "try", "aside"]

KINDS: dict[Kind, str] = {
    "plain": "the plain script",
    "try": "under a candidate",
    "plan": "under the chosen plan",
    "aside": "warming up or taken apart",
}
"""What the steps of a timeline were measured for, as the reader needs to tell them apart."""

EACH = 4
"""So many dots of one kind stay in one part of the time, its fastest and slowest among them."""

MOST_OUTLIERS = 2000
"""Steps far above the others that are drawn besides those which stay anyway."""

FAR = 3.0
"""A step so many interquartile ranges above the upper quartile of its kind is far out (Tukey 1977)."""

LONGEST_S = 1e10
"""No clock that counts from the start of a process comes as far: three centuries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One step as it is drawn: when it began, how long it took, why, and whether an evaluation lay inside it."""

    start_s: float
    step_s: float
    kind: Kind
    outside: bool


def dots(result: Result) -> tuple[Dot, ...]:
    """Every step of the timeline that can be drawn."""
    chosen = result.winner.label if result.winner is not None and result.plan is not None else None
    return tuple(
        Dot(start_s=step.start_s, step_s=step.step_s, kind=_kind(step, chosen), outside=step.outside_s > 0)
        for step in result.timeline
        if abs(step.start_s) < LONGEST_S and 0 < step.step_s < LONGEST_S
    )


def thin(found: Sequence[Dot], *, slices: int) -> tuple[Dot, ...]:
    """At most about `EACH` dots of each kind in each of so many slices of the time, and `MOST_OUTLIERS` besides."""
    if len(found) <= slices * EACH:
        return tuple(found)
    first_s = min(dot.start_s for dot in found)
    whole_s = max(dot.start_s for dot in found) - first_s or 1.0
    parts: dict[tuple[int, Kind, bool], list[Dot]] = {}
    durations: dict[Kind, list[float]] = {}
    for dot in found:
        number = min(int((dot.start_s - first_s) / whole_s * slices), slices - 1)
        parts.setdefault((number, dot.kind, dot.outside), []).append(dot)
        durations.setdefault(dot.kind, []).append(dot.step_s)
    kept = []
    for part in parts.values():
        ordered = sorted(part, key=lambda dot: dot.step_s)
        stride = max((len(ordered) - 1) / (EACH - 1), 1.0)
        kept += [ordered[round(number * stride)] for number in range(min(EACH, len(ordered)))]
    fences = {}
    for kind, values in durations.items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        fences[kind] = high + FAR * (high - low)
    far = [dot for dot in found if dot.step_s > fences[dot.kind]]
    slowest = heapq.nlargest(MOST_OUTLIERS, far, key=lambda dot: dot.step_s)
    return tuple(sorted({id(dot): dot for dot in (*kept, *slowest)}.values(), key=lambda dot: dot.start_s))


def _kind(step: TimelineStep, chosen: str | None) -> Kind:
    if step.group in ("anatomy", "warm-up", "counterfactual", "stacks", "reads", "profile"):
        return "aside"
    if step.label == "plain":
        return "plain"
    return "plan" if step.label == chosen else "try"
