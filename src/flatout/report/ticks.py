"""Which round numbers stand at a figure's axes?

In: the range of an axis and how many labels it has room for. Out: places, and what is written there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from flatout.report import words


def said(places: Iterable[float], say: Callable[[float], str]) -> list[tuple[float, str]]:
    """Each place with what is written there."""
    return [(place, say(place)) for place in places]


def even(last: float, most: int) -> list[float]:
    """Round numbers from 0 to at most `last`."""
    if last <= 0:
        return [0.0]
    size = 10.0 ** math.floor(math.log10(last / most))
    stride = next(size * k for k in (1, 2, 5, 10, 20) if last / (size * k) <= most)
    return [number * stride for number in range(int(last / stride) + 1)]


def between(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, wherever zero lies."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    stride = next(size * k for k in (1, 2, 5, 10, 20) if (high - low) / (size * k) <= most)
    return [number * stride for number in range(math.ceil(low / stride), math.floor(high / stride) + 1)]


def clock_times(first_s: float, last_s: float, most: int) -> list[float]:
    """The same for times of day: over two minutes or more in whole minutes or hours.

    >>> clock_times(0.0, 400.0, 4), clock_times(118.0, 131.0, 4)
    ([0.0, 120.0, 240.0, 360.0], [120.0, 125.0, 130.0])
    """
    over_s = last_s - first_s
    if over_s <= 0:
        return [first_s]
    if over_s < 120:
        return _each_once(between(first_s, last_s, most))
    strides = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 432000)
    stride = next((s for s in strides if over_s / s <= most), 10 * 86400)
    return _each_once(float(n * stride) for n in range(math.ceil(first_s / stride), int(last_s / stride) + 1))


def _each_once(times_s: Iterable[float]) -> list[float]:
    """Those that `clock` says differently: of 3 min 20.2 s and 3 min 20.4 s the first."""
    return list({clock(time_s): time_s for time_s in reversed([*times_s])}.values())[::-1]


def clock(value_s: float) -> str:
    """A time of day as `clock_times` chooses them."""
    return words.seconds(value_s) if value_s < 120 else words.duration(value_s)


def logarithmic(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade; only whole decades where that would be many."""
    found = [
        k * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for k in (1, 2, 5)
        if low <= k * 10.0**e <= high
    ]
    decades = [x for x in found if f"{x:e}".startswith("1.0")]
    return decades if len(found) > 8 and len(decades) > 1 else found


def ratios(low: float, high: float, most: int) -> list[float]:
    """Round ratios between two others; 1 is always among them."""
    for steps in ((0.9, 0.95, 1.0, 1.05, 1.1, 1.2), (0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6), (0.5, 0.7, 1.0, 1.5, 2, 3, 4)):
        if low >= steps[0] * 0.8 and high <= steps[-1] * 1.1:
            found = [x for x in steps if low <= x <= high]
            return found if len(found) <= most else [x for x in found if x in (0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.6, 2, 3)]
    found = [x for x in (0.01, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0) if low <= x <= high]
    return found if len(found) <= most else [x for x in found if x in (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)]


def decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between two others."""
    exponents = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    stride = max(math.ceil(len(exponents) / most), 1)
    return [10.0**e for e in exponents[::stride]]
