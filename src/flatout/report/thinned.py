"""Which steps of a long timeline are drawn? So few that the page stays small, so chosen that nothing unusual is lost.

In: steps with their times. Out: some of them. Of each narrow slice of time and each kind the fastest and the slowest
step stay, and a few between. A step far above its kind's others stays as well; of more than `MOST_OUTLIERS` such steps
the slowest stay. Only the drawing is thinned, the numbers beside it are not.
"""

from __future__ import annotations

import heapq
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

MOST_OUTLIERS = 2000
"""Steps far above the others that are drawn besides those which stay anyway."""

FAR = 3.0
"""A step so many interquartile ranges above the upper quartile of its kind is far out (Tukey 1977)."""

LONGEST_S = 1e10
"""No clock that counts from the start of a process comes as far: three centuries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One step as it is drawn.

    Attributes:
        start_s: When it began.
        step_s: How long it took, with what lay inside.
        kind: Why it was measured.
        outside: Whether evaluation or a checkpoint lay inside it.
        number: Its place among all steps of the timeline, from 1.
        label: The levers, as people read them.
    """

    start_s: float
    step_s: float
    kind: Kind
    outside: bool
    number: int = 0
    label: str = ""


def dots(result: Result) -> tuple[Dot, ...]:
    """Every step of the timeline that can be drawn."""
    chosen = result.winner.label if result.winner is not None and result.plan is not None else None
    return tuple(
        Dot(
            start_s=step.start_s,
            step_s=step.step_s,
            kind=_kind(step, chosen),
            outside=step.outside_s > 0,
            number=number,
            label=step.label,
        )
        for number, step in enumerate(result.timeline, 1)
        if abs(step.start_s) < LONGEST_S and 0 < step.step_s < LONGEST_S
    )


def slowest(found: Sequence[Dot], most: int) -> list[Dot]:
    """So many of the slowest steps, the slowest first."""
    return heapq.nlargest(most, found, key=lambda dot: dot.step_s)


def thin(found: Sequence[Dot], *, slices: int, each: int = 4) -> tuple[Dot, ...]:
    """At most about `slices * each` of the dots of each kind, and at most `MOST_OUTLIERS` besides.

    Args:
        found: All dots.
        slices: Into how many parts the time is cut.
        each: How many dots of one kind stay in one part, its fastest and slowest among them; at least 2.
    """
    if len(found) <= slices * each:
        return tuple(found)
    first_s = min(dot.start_s for dot in found)
    whole_s = max(dot.start_s for dot in found) - first_s or 1.0
    parts: dict[tuple[int, Kind, bool], list[Dot]] = {}
    for dot in found:
        number = min(int((dot.start_s - first_s) / whole_s * slices), slices - 1)
        parts.setdefault((number, dot.kind, dot.outside), []).append(dot)
    ordered = [sorted(part, key=lambda dot: dot.step_s) for part in parts.values()]
    fences = _fences(found)
    far = [dot for dot in found if dot.step_s > fences[dot.kind]]
    kept = [dot for part in ordered for dot in _some(part, each)]
    chosen = {id(dot): dot for dot in (*kept, *slowest(far, MOST_OUTLIERS))}
    return tuple(sorted(chosen.values(), key=lambda dot: dot.start_s))


def _some(ordered: list[Dot], each: int) -> list[Dot]:
    if len(ordered) <= each:
        return ordered
    between = ordered[1:-1]
    stride = len(between) / max(each - 2, 1)
    return [ordered[0], *(between[int(number * stride)] for number in range(each - 2)), ordered[-1]]


def _fences(found: Sequence[Dot]) -> dict[Kind, float]:
    """By kind, the duration above which a step is far out."""
    durations: dict[Kind, list[float]] = {}
    for dot in found:
        durations.setdefault(dot.kind, []).append(dot.step_s)
    fences = {}
    for kind, values in durations.items():
        values.sort()
        low, high = values[len(values) // 4], values[3 * len(values) // 4]
        fences[kind] = high + FAR * (high - low)
    return fences


def _kind(step: TimelineStep, chosen: str | None) -> Kind:
    if step.group in ("anatomy", "warm-up", "counterfactual", "stacks", "reads"):
        return "aside"
    if step.label == "plain":
        return "plain"
    return "plan" if step.label == chosen else "try"
