"""Is a metric the same with and without something, as far as so many seeds can tell?

In: the metric's value of each seed, without and with it, and a margin. Out: an `Equivalence`: a difference that does
not matter has to be shown; that none was found is not enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flatout.judge.stats import student

MIN_SEEDS = 3
"""With fewer, neither a spread nor an interval says anything."""

MOST_SEEDS = 1000
"""So many more are never proposed: who would need them needs another margin."""

ASTRAY = 4.0
"""A seed that makes the deviation so many times as large is an accident, not what seeds do."""

LARGEST = 1e150
"""The square of what is larger overflows."""

Word = Literal["identical", "equivalent", "different", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """What the seeds say.

    Attributes:
        verdict: *identical* where every seed has the same value on both sides; *equivalent* where the 90 % interval of
            the mean difference lies within the margin (two one-sided tests of 5 %); *different* where the 95 % interval
            lies outside of it; else *undecided*.
        difference: Mean of changed minus plain, in the metric's unit; NaN where it could not be judged.
        low: Lower end of the 90 % interval of the mean difference.
        high: Upper end.
        margin: Up to which difference, to either side, nothing is said to have changed.
        margin_source: Where the margin comes from.
        plain_spread: Standard deviation of the plain values between seeds.
        num_seeds: Seeds with a value on both sides.
        more_seeds: About how many more would decide; None where no reasonable number would, or nothing is open.
        reason: Why it is undecided, or different without an interval; else empty.
        num_diverged: Seeds whose values are NaN or infinite on both sides.
    """

    verdict: Word
    difference: float
    low: float
    high: float
    margin: float
    margin_source: str
    plain_spread: float
    num_seeds: int
    more_seeds: int | None = None
    reason: str = ""
    num_diverged: int = 0


def compare(plain: Sequence[float], changed: Sequence[float], margin: float | None = None) -> Equivalence:
    """Two one-sided t tests on the differences of the seeds.

    Args:
        plain: The metric of each seed without the change.
        changed: The metric of the same seed with it.
        margin: What difference may be; None for the standard deviation of `plain` between its seeds.

    >>> compare([0.981, 0.979, 0.983], [0.981, 0.979, 0.983]).verdict
    'identical'
    >>> compare([0.98, 0.97, 0.99, 0.98], [0.90, 0.91, 0.89, 0.90], margin=0.01).verdict
    'different'
    >>> compare([0.98], [0.98], margin=0.01).reason
    '1 of at least 3 seeds that are needed'

    Raises:
        ValueError: The numbers of values differ, or the margin is no positive number.

    Source: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
    equivalence of average bioavailability" (1987).
    """
    if len(plain) != len(changed):
        raise ValueError(f"{len(plain)} plain values but {len(changed)} changed ones")
    if margin is not None and not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"{margin} is no margin")
    finite = [(a, b) for a, b in zip(plain, changed, strict=True) if math.isfinite(a) and math.isfinite(b)]
    one_side = sum(math.isfinite(a) != math.isfinite(b) for a, b in zip(plain, changed, strict=True))
    if any(abs(x) > LARGEST for pair in finite for x in pair):
        return _one_side_of(one_side, _too_large(finite, margin))
    spread = _deviation([a for a, _ in finite])
    usual, source = _usual_spread([a for a, _ in finite]) if margin is None else (margin, "as asked for")
    found = _Found(finite, usual, source, spread)
    if one_side:
        return _one_side_of(one_side, found.says("different"))
    if num := len(plain) - len(finite):
        seeds = "every seed" if num == len(plain) else f"{num} of {len(plain)} seeds"
        reason = f"with {seeds} both sides came to NaN or infinity"
        return replace(found.says("undecided", reason=reason), num_diverged=num)
    if len(finite) < MIN_SEEDS:
        return found.says(
            "undecided", reason=f"{len(finite)} of at least {MIN_SEEDS} seeds that are needed",
            more=MIN_SEEDS - len(finite),
        )  # fmt: skip
    if all(a == b for a, b in finite):
        return found.says("identical")
    return _judged(found)


def _one_side_of(num: int, found: Equivalence) -> Equivalence:
    """The same, but different where a value is not finite on one side only."""
    if not num:
        return found
    seeds = "a seed" if num == 1 else f"{num} seeds"
    return replace(found, verdict="different", reason=f"with {seeds} only one side came to NaN or infinity")


def _too_large(pairs: Sequence[tuple[float, float]], margin: float | None) -> Equivalence:
    nan = float("nan")
    return Equivalence(
        verdict="undecided", difference=nan, low=nan, high=nan, margin=nan if margin is None else margin,
        margin_source="as asked for" if margin is not None else "", plain_spread=nan, num_seeds=len(pairs),
        reason="values are so large that no float holds their squares: print the logarithm of the metric",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Found:
    pairs: Sequence[tuple[float, float]]
    margin: float
    source: str
    spread: float

    def says(self, verdict: Word, *, reason: str = "", more: int | None = None) -> Equivalence:
        differences = [b - a for a, b in self.pairs]
        low, high = _interval(differences, 0.90)
        return Equivalence(
            verdict=verdict,
            difference=_mean(differences),
            low=low,
            high=high,
            margin=self.margin,
            margin_source=self.source,
            plain_spread=self.spread,
            num_seeds=len(self.pairs),
            more_seeds=more,
            reason=reason,
        )


def _judged(found: _Found) -> Equivalence:
    differences = [b - a for a, b in found.pairs]
    if not found.margin > 0:
        return found.says(
            "undecided", reason="all plain seeds have one value, so there is no spread to take a margin from"
        )
    low, high = _interval(differences, 0.90)
    if -found.margin < low and high < found.margin:
        return found.says("equivalent")
    low, high = _interval(differences, 0.95)
    if low > found.margin or high < -found.margin:
        return found.says("different")
    return found.says(
        "undecided", reason="the interval reaches beyond the margin", more=_more(differences, found.margin)
    )


def _more(differences: Sequence[float], margin: float) -> int | None:
    """How many seeds more would decide if mean and deviation stay as they are."""
    room = abs(margin - abs(_mean(differences)))
    level = 0.90 if abs(_mean(differences)) < margin else 0.95
    deviation = _deviation(differences)
    for num in range(len(differences) + 1, MOST_SEEDS):
        if student(num - 1, level) * deviation / math.sqrt(num) < room:
            return num - len(differences)
    return None


def _interval(values: Sequence[float], level: float) -> tuple[float, float]:
    if len(values) < 2:
        return float("nan"), float("nan")
    half = student(len(values) - 1, level) * _deviation(values) / math.sqrt(len(values))
    return _mean(values) - half, _mean(values) + half


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else float("nan")


def _usual_spread(values: Sequence[float]) -> tuple[float, str]:
    """The standard deviation; without the one value that is `ASTRAY` times as far off as the others lie apart."""
    whole = _deviation(values)
    if len(values) > MIN_SEEDS + 1:  # three others may lie close together by chance
        middle = sorted(values)[len(values) // 2]
        others = sorted(values, key=lambda value: abs(value - middle))[:-1]
        if _deviation(others) * ASTRAY < whole:
            return _deviation(others), "the standard deviation between plain seeds but one, which is far off"
    return whole, "the standard deviation between plain seeds"


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return float("nan")
    mean = _mean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
