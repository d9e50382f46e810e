"""Under which measured ceiling does an operation stand, and how far from it?

In: an operation of a census, and the machine's `Ceilings`. Out: a `Standing`, or None where the record cannot tell.
Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures",
CACM 52(4), 2009; with a second slope for what caches hold, as in Ilic, Pratas, Sousa, "Cache-aware roofline model",
IEEE Computer Architecture Letters 13(1), 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.records.ceilings import Ceiling, Ceilings
from flatout.records.trace import Operation

SHORTEST_CALL_S = 1e-6
"""Calls that last shorter are not judged: reading the clock twice is a tenth of that, and half of it is Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One operation under the ceiling that binds it.

    Attributes:
        operation: As it was counted.
        ceiling: The limit that asks for the most time.
        least_s: The least time in which the machine can do all its calls.
    """

    operation: Operation
    ceiling: Ceiling
    least_s: float

    @property
    def fraction(self) -> float:
        """Share of its ceiling that it reached; above 1 the ceiling is too low or the work was overcounted."""
        return self.least_s / self.operation.self_s

    def is_above(self) -> bool:
        """Whether it exceeds its ceiling by more than the ceiling's spread."""
        return self.fraction > 1 + self.ceiling.spread_fraction


def standing(operation: Operation, ceilings: Ceilings) -> Standing | None:
    """Where an operation stands; None where it does nothing that is limited, or its time says nothing.

    Up to two cachefuls of a call need not pass the memory: what lay in the cache before it, and what it leaves there
    to be written back later. They are limited by the cache's own rate. An accelerator is not judged: there the time
    of an operation is the time to enqueue it.
    """
    if ceilings.device != "cpu" or not operation.self_s >= SHORTEST_CALL_S * operation.num_calls:
        return None  # `not >=`, so that an unknown time, which is NaN, is not judged either
    found = least(operation, ceilings, operation.dtype)
    return None if found is None else Standing(operation=operation, ceiling=found[1], least_s=found[0])


def least(operation: Operation, ceilings: Ceilings, dtype: str) -> tuple[float, Ceiling] | None:
    """The least time for all its calls, multiplying in `dtype`, and what limits that; None where nothing does."""
    peak = ceilings.peak(dtype) or max(ceilings.peaks().values(), key=lambda c: c.value, default=None)
    cache, memory = ceilings.get("memory_cache"), ceilings.bandwidth()
    cache_bytes = (ceilings.machine.last_level_cache_bytes or 0) if ceilings.device == "cpu" else 0
    call_bytes = operation.moved_bytes / operation.num_calls
    beyond_bytes = operation.num_calls * max(0.0, call_bytes - 2 * cache_bytes)
    cached_s = (operation.moved_bytes - beyond_bytes) / cache.value if cache else 0.0
    beyond_s = beyond_bytes / memory.value if memory else 0.0
    limits = (
        (operation.flops / peak.value if peak else 0.0, peak),
        (cached_s + beyond_s, cache if cached_s >= beyond_s else memory),
    )
    least_s, ceiling = max(limits, key=lambda limit: limit[0])
    return (least_s, ceiling) if ceiling is not None and least_s > 0 else None
