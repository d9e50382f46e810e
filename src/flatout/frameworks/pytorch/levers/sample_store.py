"""sample_store: compute each item once and keep it; from the second pass over the data on a batch is a gather.

What is not kept yet is computed at once, as under `fused_fetch`, which it takes the place of.

What items are made of is looked at with each batch, what is in arrays and lists with each pass, and a share of the kept
items is computed again for as long as the script runs. All items are kept, where they fit into half of the memory that
is free, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flatout.frameworks.pytorch.lever_bases import LoaderLever
from flatout.records.facts import Facts
from flatout.records.trace import Setting


class SampleStore(LoaderLever):
    """Items are kept in memory."""

    name = "sample_store"
    summary = "each item computed once and kept in memory, where it is known what it is made of"
    keeps_items = True
    takes_memory = True
    conflicts: ClassVar = ("workers", "fused_fetch")
    contains: ClassVar = ("fused_fetch",)
    partners: ClassVar = ("virtual_workers",)
    part = "stored"
    counted = ("num_batches", "batches of kept items")

    def in_part(self, facts: Facts) -> str | None:
        """What is not kept is computed at once, where that can be."""
        return "computes batches at once" if any(one.refusal("fused_fetch") is None for one in facts.loaders) else None

    def serves_workers(self, loader: Any) -> bool:
        """It takes the place of the script's workers."""
        return bool(loader.num_workers > 0)

    def engage(self, session: Any, settings: Mapping[str, Setting]) -> None:
        """From the next fetch on; items that are kept already stay."""
        loaders = session.loaders
        loaders.parts.stored.engage(True, fill=loaders.training if loaders.reopen else ())  # at once in a trial
        loaders.attach()
