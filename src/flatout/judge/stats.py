"""Is one faster than the other? The only place that says so.

In: step times of paired windows. Out: a `Comparison` with its interval, or the reason why nothing can be said.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIN_PAIRS = 4
"""Fewer pairs than this are never judged: with three, the 99 % interval is ten standard errors wide."""

RANKED_PAIRS = 8
"""From so many pairs on the interval is the signed-rank one, which has a 99 % level from here on."""

ERRORS = (0.05, 0.01)
"""How often the two intervals of a comparison may miss the truth, over all looks at it together."""

NEGLIGIBLE = 0.02
"""A ratio whose 95 % interval lies within 1 ± this is `no difference`."""

MOST_RANKED = 256
"""Of more pairs the means of neighbours are ranked: the work grows with the cube of the number."""

RESOLUTION = 1e-9
"""Log ratios that scatter less than this scatter by rounding alone: real clocks and real machines scatter more."""

Verdict = Literal["faster", "slower", "no difference", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times as fast the candidate is as the baseline.

    Attributes:
        verdict: *faster* or *slower* where the 99 % interval excludes 1; *no difference* where the 95 % interval lies
            within 0.98 to 1.02; else *inconclusive*.
        ratio: Baseline step time over candidate step time; NaN where it could not be judged.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        low99: Lower end of the 99 % interval.
        high99: Upper end of the 99 % interval.
        num_pairs: Pairs of windows.
        reason: Why it is inconclusive, or empty.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    low99: float
    high99: float
    num_pairs: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Samples in a few numbers; the unit is that of the samples."""

    num: int
    mean: float
    median: float
    low: float
    high: float
    """The 5th and the 95th percentile."""
    spread_fraction: float
    """Half the interquartile range over the median."""


def summarize(samples: Sequence[float]) -> Summary:
    """Summary of finite samples.

    >>> summarize([1.0, 2.0, 3.0]).median
    2.0

    Raises:
        ValueError: No samples, or one that is NaN or infinite.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    if not all(math.isfinite(x) for x in samples):
        raise ValueError("samples that are not finite cannot be summarised")
    ordered = sorted(samples)
    median = quantile(ordered, 0.5)
    half_range = (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / 2
    return Summary(
        num=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        median=median,
        low=quantile(ordered, 0.05),
        high=quantile(ordered, 0.95),
        spread_fraction=half_range / abs(median) if median else 0.0,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear-interpolated quantile of sorted samples (type 7 of Hyndman and Fan 1996, NumPy's default).

    >>> quantile([0.0, 1.0], 0.25)
    0.25
    """
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def compare(
    baseline_s: Sequence[float], candidate_s: Sequence[float], *, share: float = 1.0, noise: float = 0.0
) -> Comparison:
    """Ratio of paired window step times with its interval, on the logarithm.

    The two windows of a pair were measured next to each other, in an order drawn by lot. From `RANKED_PAIRS` pairs on,
    ratio and interval are those of Wilcoxon's signed-rank test on the log ratios (Hodges and Lehmann). It asks only
    that a log ratio scatters alike to both sides, which the lot sees to whatever the machine does meanwhile; and one
    pair that a neighbour's burst fell into does not move it. Fewer pairs are judged by Student's t on the mean, which
    asks for roughly normal noise.

    Args:
        baseline_s: Seconds per step of each baseline window.
        candidate_s: Seconds per step of the candidate window beside it.
        share: The part of the `ERRORS` that this look at the comparison may spend, above 0 to 1; what all looks spend
            sums to at most 1, see `flatout.judge.sequential`.
        noise: The standard deviation of log ratios between equal sides, as it was seen before: fewer than
            `RANKED_PAIRS` pairs that scatter less than that are not believed to.

    >>> compare([2.0, 2.02, 1.98, 2.01], [1.0, 1.01, 0.98, 1.02]).verdict
    'faster'
    >>> compare([2.0], [1.0]).reason
    '1 of at least 4 pairs of windows that are needed'

    Raises:
        ValueError: The numbers of windows differ, or there is no such share.

    Source: paired t interval on log ratios, e.g. Kalibera and Jones, "Rigorous benchmarking in reasonable time" (2013);
    Hollander, Wolfe, Chicken, "Nonparametric statistical methods" (2014), sections 3.1 to 3.3; Ernst, "Permutation
    methods: a basis for exact inference" (2004) for what the lot brings.
    """
    if len(baseline_s) != len(candidate_s):
        raise ValueError(f"{len(baseline_s)} baseline windows but {len(candidate_s)} candidate windows")
    if not 0 < share <= 1:
        raise ValueError(f"{share} is no share of the errors that may be spent")
    reason = _unfit(baseline_s, candidate_s)
    if reason:
        return _undecided(len(baseline_s), reason)
    # A difference of logarithms, not the logarithm of a ratio: swapping sides then only changes the sign.
    logs = [math.log(a) - math.log(b) for a, b in zip(baseline_s, candidate_s, strict=True)]
    num = len(logs)
    mean = math.fsum(logs) / num
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (num - 1))
    if deviation < RESOLUTION:
        if abs(mean) >= RESOLUTION or max(baseline_s) - min(baseline_s) < RESOLUTION * max(baseline_s):
            return _undecided(num, "all pairs are identical: the clock is too coarse or the samples are not real")
        logs, mean, deviation = [0.0] * num, 0.0, 0.0
    levels = [1 - share * error for error in ERRORS]
    if num >= RANKED_PAIRS:
        centre, *intervals = _ranked(logs, levels)
    else:
        centre, *intervals = _normal(mean, max(deviation, noise), num, levels)
    (low, high), (low99, high99) = [(_exp(bottom), _exp(top)) for bottom, top in intervals]
    verdict = _verdict(low, high, low99, high99)
    return Comparison(
        verdict=verdict, ratio=_exp(centre), low=low, high=high, low99=low99, high99=high99, num_pairs=num,
        reason=_reason(verdict, low, high),
    )  # fmt: skip


def scatter(first_s: Sequence[float], second_s: Sequence[float]) -> float:
    """Standard deviation of the log ratios of equal sides, from their median size, which a burst does not move.

    >>> round(scatter([1.0, 1.0, 1.0, 1.0], [1.01, 0.99, 1.01, 3.0]), 3)
    0.015

    Returns 0 where fewer than `MIN_PAIRS` pairs, or none that can be judged, were measured.

    Source: the median of |x| is 0.6745 standard deviations of normal noise around 0.
    """
    if _unfit(first_s, second_s):
        return 0.0
    sizes = sorted(abs(math.log(a) - math.log(b)) for a, b in zip(first_s, second_s, strict=True))
    return quantile(sizes, 0.5) / 0.6745


_Interval = tuple[float, float]


def _normal(mean: float, deviation: float, num: int, levels: Sequence[float]) -> tuple[float, _Interval, _Interval]:
    """Mean and intervals of samples that are roughly normal."""
    error = deviation / math.sqrt(num)
    half95, half99 = (error * student(num - 1, level) for level in levels)
    return mean, (mean - half95, mean + half95), (mean - half99, mean + half99)


def _ranked(samples: Sequence[float], levels: Sequence[float]) -> tuple[float, _Interval, _Interval]:
    """The Hodges-Lehmann centre and intervals of samples that scatter alike to both sides of it.

    So do the means of neighbours; samples that do not fill a last run of neighbours are left out of that many.
    """
    if len(samples) > MOST_RANKED:
        width = -(-len(samples) // MOST_RANKED)
        samples = [math.fsum(samples[n : n + width]) / width for n in range(0, len(samples) - width + 1, width)]
    num = len(samples)
    averages = sorted((samples[i] + samples[j]) / 2 for i in range(num) for j in range(i, num))
    first, second = (_between(averages, _rank_quantile(num, (1 - level) / 2)) for level in levels)
    return quantile(averages, 0.5), first, second


def _between(averages: Sequence[float], outside: int) -> _Interval:
    """From the average with so many to its left, itself included, to its mirror; everywhere where there is none."""
    return (averages[outside - 1], averages[-outside]) if outside else (-math.inf, math.inf)


@functools.cache
def _rank_quantile(num: int, share: float) -> int:
    """Which of the averages is the lower end of the interval, counted from 1: the largest k with P(T < k) <= share.

    T is the signed-rank statistic of `num` samples: the sum of a random set of the ranks 1 to `num`.
    """
    ways = [1]
    for rank in range(1, num + 1):
        longer = ways + [0] * rank
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    below, k = 0, 0
    while below + ways[k] <= share * 2**num:
        below += ways[k]
        k += 1
    return k


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _verdict(low: float, high: float, low99: float, high99: float) -> Verdict:
    # A gain below 2 % that is surely there is still "faster": the user decides whether it is worth it.
    if low99 > 1:
        return "faster"
    if high99 < 1:
        return "slower"
    return "no difference" if low >= 1 - NEGLIGIBLE and high <= 1 + NEGLIGIBLE else "inconclusive"


def _reason(verdict: Verdict, low: float, high: float) -> str:
    if verdict != "inconclusive":
        return ""
    return "not sure enough: 1 lies in the 99 % interval" if low > 1 or high < 1 else "the interval is too wide to tell"


def _unfit(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> str:
    samples = [*baseline_s, *candidate_s]
    if any(not math.isfinite(x) for x in samples):
        return "a window has no finite step time"
    if any(x <= 0 for x in samples):
        return "a window has a step time of zero or less: the clock went backwards or stood still"
    if len(baseline_s) < MIN_PAIRS:
        return f"{len(baseline_s)} of at least {MIN_PAIRS} pairs of windows that are needed"
    return ""


def _undecided(num: int, reason: str) -> Comparison:
    nan = float("nan")
    return Comparison(
        verdict="inconclusive", ratio=nan, low=nan, high=nan, low99=nan, high99=nan, num_pairs=num, reason=reason
    )


def student(degrees: int, level: float) -> float:
    """Student's t: what a mean may miss, in standard errors, for a two-sided interval of this level.

    >>> round(student(9, 0.95), 3)
    2.262
    """
    from scipy.special import stdtrit  # a quarter of a second less than scipy.stats

    return float(stdtrit(degrees, 0.5 + level / 2))
