"""How much of the free memory may be taken for items that are kept, on the machine or on a device?

In: bytes that are free. Out: bytes that may be taken. A cache must never be why the machine swaps or a step runs out
of memory.
"""

LEAST_FREE_BYTES = 2**30
"""Memory that what is kept leaves to everybody else."""

FREE_SHARE = 0.5
"""How much of the memory beyond that it may take."""


def may_take_bytes(free_bytes: int | None) -> int:
    """What may be taken; None is unknown.

    >>> may_take_bytes(3 * 2**30) == 2**30, may_take_bytes(2**29), may_take_bytes(None)
    (True, 0, 0)
    """
    return 0 if free_bytes is None else max(0, int((free_bytes - LEAST_FREE_BYTES) * FREE_SHARE))
