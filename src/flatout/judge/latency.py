"""How long does a call take, and how long the slow ones? Percentiles, where there are calls enough to know them.

In: seconds of single calls. Out: percentiles, or why one is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.99
"""With which a percentile is known. With this many calls, none of them slower, a share of slow ones is ruled out: 0.99
to the power of 459 is 0.01. Source: MLPerf Inference's early stopping."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Calls by how long they took.

    Attributes:
        num_calls: How many.
        seconds: By percentile; of those alone that so many calls can tell.
        steps_per_s: Steps a second in the same windows, whatever lies in them; None where it is not known.
    """

    num_calls: int
    seconds: dict[int, float]
    steps_per_s: float | None = None


def fewest(percentile: int) -> int:
    """So many calls tell a percentile.

    >>> [fewest(p) for p in PERCENTILES]
    [7, 44, 459]
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(percentile / 100))


def latency(samples: Sequence[float]) -> Latency:
    """Percentiles by the nearest rank.

    >>> latency([0.1] * 43 + [0.2] * 7)
    Latency(num_calls=50, seconds={50: 0.1, 90: 0.2}, steps_per_s=None)
    """
    ordered = sorted(samples)
    known = [p for p in PERCENTILES if len(ordered) >= fewest(p)]
    return Latency(num_calls=len(ordered), seconds={p: ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in known})
