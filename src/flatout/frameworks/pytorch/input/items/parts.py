"""Which parts give batches in other ways? In: loaders' iterators. Out: the same, asking engaged parts for batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.decoders import Decoding
from flatout.frameworks.pytorch.input.items.cached_batches import StoredItems
from flatout.frameworks.pytorch.input.items.fused import FusedFetch
from flatout.frameworks.pytorch.input.items.in_process import InProcess
from flatout.frameworks.pytorch.input.read_ahead.owner import ReadAhead


class InputParts:
    """All of one process.

    Args:
        store_memory_bytes: Memory for kept items; None: what is free allows.
    """

    def __init__(self, store_memory_bytes: int | None = None) -> None:
        self.fused = FusedFetch()
        self.stored = StoredItems(self.fused, store_memory_bytes)
        self.decoded = Decoding()
        self.files = ReadAhead()

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Have an iterator that fetches in this process ask us."""
        self.fused.attach(loader, iterator)
        self.stored.attach(loader, iterator)
        self.files.attach(loader, iterator)

    def in_process(self, loader: DataLoader[Any], *, fast: bool) -> InProcess:
        """A new pass over a loader with workers, without them; `fast`: where it is known what its items are."""
        return InProcess(loader, self.fused if fast else None, self.stored)
