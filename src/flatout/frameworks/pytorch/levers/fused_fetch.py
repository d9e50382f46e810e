"""fused_fetch: compute each batch at once, where it is known what the dataset computes, and collate nothing.

What a dataset computes is read from its own code (`flatout.frameworks.pytorch.input.items`). The batches are bit for
bit the same, and a share of them is computed both ways for as long as the script runs.
"""

from __future__ import annotations

from typing import ClassVar

from flatout.frameworks.pytorch.lever_bases import LoaderLever


class FusedFetch(LoaderLever):
    """One call for all items of a batch."""

    name = "fused_fetch"
    summary = "each batch computed at once instead of item by item, from what the dataset's own code says"
    conflicts: ClassVar = ("workers",)
    part = "fused"
    counted = ("num_batches", "batches computed at once")
