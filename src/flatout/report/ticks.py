"""Which round numbers stand at a figure's axes?

In: the range of an axis and how many labels it has room for. Out: places, and what is written there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable


def said(places: Iterable[float], say: Callable[[float], str]) -> list[tuple[float, str]]:
    """Each place with what is written there."""
    return [(place, say(place)) for place in places]


def between(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, wherever zero lies."""
    if high <= low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    stride = next(size * k for k in (1, 2, 5, 10, 20) if (high - low) / (size * k) <= most)
    return [number * stride for number in range(math.ceil(low / stride), math.floor(high / stride) + 1)]


def times(first_s: float, last_s: float, most: int) -> list[tuple[float, str]]:
    """The same on a clock, in seconds, minutes or hours.

    >>> times(0.0, 400.0, 4), times(118.0, 131.0, 4)
    ([(0.0, '0 min'), (120.0, '2 min'), (240.0, '4 min'), (360.0, '6 min')], [(120.0, '120 s'), (125.0, '125 s'),
    (130.0, '130 s')])
    """
    size, unit = next((s, u) for s, u in ((3600, "h"), (60, "min"), (1, "s")) if last_s - first_s >= 3 * s or s == 1)
    return [(x * size, f"{x:.13g} {unit}") for x in between(first_s / size, last_s / size, most)]


def logarithmic(low: float, high: float, most: int = 8) -> list[float]:
    """1, 2 and 5 of every decade; only powers of ten, or a few of these, where that would be too many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [k * 10.0**e for e in exponents for k in (1, 2, 5) if low <= k * 10.0**e <= high]
    stride = 1
    while len(found) > most:
        found = [10.0**e for e in exponents if e % stride == 0 and low <= 10.0**e <= high] or found[:1]
        stride += 1
    return found


def ratios(low: float, high: float, most: int) -> list[float]:
    """Round ratios between two others; 1 is always among them.

    >>> ratios(0.2, 1.125, 5)
    [0.2, 0.4, 0.6, 0.8, 1.0]
    """
    for parts in (20, 10, 5, 2, 1):
        first, last = math.ceil((low - 1) * parts), math.floor((high - 1) * parts)
        if last - first < most:
            places = ((parts + number) / parts for number in range(first, last + 1))
            return [place for place in places if low <= place <= high]  # an end may be missed by a last digit
    return logarithmic(low, high, most)
