"""Is a metric the same with and without something, as far as so many seeds can tell?

In: the metric's value of each seed, without and with it, and a margin. Out: an `Equivalence`: a difference that does
not matter has to be shown; that none was found is not enough.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.judge.stats import student

MIN_SEEDS = 3
"""With fewer, neither a spread nor an interval says anything."""

MOST_SEEDS = 1000
"""So many more are never proposed: who would need them needs another margin."""

ASTRAY = 4.0
"""A seed that makes the deviation so many times as large is an accident, not what seeds do."""

LARGEST = 1e100
"""What is larger is as good as infinite: its square overflows."""

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
    finite = [(abs(a) < LARGEST, abs(b) < LARGEST) for a, b in zip(plain, changed, strict=True)]
    pairs = [(a, b) for a, b, both in zip(plain, changed, finite, strict=True) if all(both)]
    differences = [b - a for a, b in pairs]
    spread, source = _spread([a for a, _ in pairs])
    wanted = spread if margin is None else margin
    num_diverged = finite.count((False, False))
    verdict, reason, more = _judged(pairs, differences, wanted, num_diverged, len(plain))
    if one_side := len(plain) - len(pairs) - num_diverged:
        seeds = "a seed" if one_side == 1 else f"{one_side} seeds"
        verdict, reason, more = "different", f"with {seeds} only one side came to NaN or infinity", None
    low, high = _interval(differences, 0.90)
    return Equivalence(
        verdict=verdict,
        difference=statistics.fmean(differences) if differences else math.nan,
        low=low,
        high=high,
        margin=wanted,
        margin_source=source if margin is None else "as asked for",
        plain_spread=_deviation([a for a, _ in pairs]),
        num_seeds=len(pairs),
        more_seeds=more,
        reason=reason,
        num_diverged=num_diverged if verdict == "undecided" else 0,
    )


def _judged(
    pairs: Sequence[tuple[float, float]], differences: Sequence[float], margin: float, num_diverged: int, num: int
) -> tuple[Word, str, int | None]:
    """The verdict, its reason, and about how many more seeds would decide."""
    if num_diverged:
        seeds = "every seed" if num_diverged == num else f"{num_diverged} of {num} seeds"
        return "undecided", f"with {seeds} both sides came to NaN or infinity", None
    if len(pairs) < MIN_SEEDS:
        more = MIN_SEEDS - len(pairs)
        return "undecided", f"{len(pairs)} of at least {MIN_SEEDS} seeds that are needed", more
    if not any(differences):
        return "identical", "", None
    if not margin > 0:
        return "undecided", "all plain seeds have one value, so there is no spread to take a margin from", None
    low, high = _interval(differences, 0.90)
    if -margin < low and high < margin:
        return "equivalent", "", None
    low, high = _interval(differences, 0.95)
    if low > margin or high < -margin:
        return "different", "", None
    # how many seeds more would decide if mean and deviation stay as they are
    mean, deviation = abs(statistics.fmean(differences)), _deviation(differences)
    level = 0.90 if mean < margin else 0.95
    for wanted in range(len(pairs) + 1, MOST_SEEDS):
        if student(wanted - 1, level) * deviation / math.sqrt(wanted) < abs(margin - mean):
            return "undecided", "the interval reaches beyond the margin", wanted - len(pairs)
    return "undecided", "the interval reaches beyond the margin", None


def _interval(values: Sequence[float], level: float) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    half = student(len(values) - 1, level) * _deviation(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def _spread(plain: Sequence[float]) -> tuple[float, str]:
    """The standard deviation; without the one value that is `ASTRAY` times as far off as the others lie apart."""
    if len(plain) > MIN_SEEDS + 1:  # three others may lie close together by chance
        middle = sorted(plain)[len(plain) // 2]
        others = sorted(plain, key=lambda value: abs(value - middle))[:-1]
        if _deviation(others) * ASTRAY < _deviation(plain):
            return _deviation(others), "the standard deviation between plain seeds but one, which is far off"
    return _deviation(plain), "the standard deviation between plain seeds"
