"""How many times has something been compiled in this process? What a window must not contain.

In: dynamo's own counters. Out: a number that only rises.
"""

from __future__ import annotations

import sys


def num_compilations() -> int:
    """Frames that dynamo has compiled; 0 while dynamo is not even imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return int(sum(dynamo.counters["frames"].values()) + dynamo.counters["stats"]["unique_graphs"])
