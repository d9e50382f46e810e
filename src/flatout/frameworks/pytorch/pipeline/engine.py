"""The parts of the input pipeline, and which of them are engaged.

In: loaders' iterators. Out: the same iterators, which ask the engaged parts for their batches.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.pipeline.fused import FusedFetch, following
from flatout.frameworks.pytorch.pipeline.in_process import InProcess
from flatout.frameworks.pytorch.pipeline.stored import Keeping, StoredItems


class InputPipeline:
    """All of one process.

    Args:
        keeping: Where items may be kept.
    """

    def __init__(self, keeping: Keeping | None = None) -> None:
        self.fused = FusedFetch()
        self.stored = StoredItems(self.fused, keeping)

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Have an iterator that fetches in this process ask us."""
        self.fused.attach(loader, iterator)
        self.stored.attach(loader, iterator)

    def following(self, iterator: Any) -> Any:
        """The next batch of an iterator."""
        return following(iterator) if self.fused.engaged or self.stored.engaged else next(iterator)

    def in_process(self, loader: DataLoader[Any]) -> InProcess:
        """A pass over a loader without its workers."""
        return InProcess(loader, self.fused, self.stored)


__all__ = ["InputPipeline", "Keeping"]
