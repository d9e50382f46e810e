"""Which steps of a long timeline are drawn? So few that the page stays small, so chosen that nothing unusual is lost.

In: steps with their times. Out: some of them. Of each narrow slice of time and each kind the fastest and the slowest
step stay, and a few between; so every outlier is drawn. Only the drawing is thinned, the numbers beside it are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.result import Result, TimelineStep

Kind = Literal["plain", "plan", "try", "aside"]

KINDS: dict[Kind, str] = {
    "plain": "the plain script",
    "try": "under a candidate",
    "plan": "under the chosen plan",
    "aside": "warming up or taken apart",
}
"""What the steps of a timeline were measured for, as the reader needs to tell them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One step as it is drawn.

    Attributes:
        start_s: When it began.
        step_s: How long it took, with what lay inside.
        kind: Why it was measured.
        outside: Whether evaluation or a checkpoint lay inside it.
    """

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
        if math.isfinite(step.start_s) and math.isfinite(step.step_s) and step.step_s > 0
    )


def thin(found: Sequence[Dot], *, slices: int, each: int = 4) -> tuple[Dot, ...]:
    """At most about `slices * each` of the dots of each kind.

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
    kept = [dot for part in parts.values() for dot in _some(part, each)]
    return tuple(sorted(kept, key=lambda dot: dot.start_s))


def _some(part: list[Dot], each: int) -> list[Dot]:
    if len(part) <= each:
        return part
    ordered = sorted(part, key=lambda dot: dot.step_s)
    between = ordered[1:-1]
    stride = len(between) / max(each - 2, 1)
    return [ordered[0], *(between[int(number * stride)] for number in range(each - 2)), ordered[-1]]


def _kind(step: TimelineStep, chosen: str | None) -> Kind:
    if step.group in ("anatomy", "warm-up", "counterfactual"):
        return "aside"
    if step.label == "plain":
        return "plain"
    return "plan" if step.label == chosen else "try"
