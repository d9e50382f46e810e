"""The parts of the input pipeline, and which of them are engaged.

In: loaders' iterators. Out: the same iterators, which ask the engaged parts for their batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.decoders import Decoding
from flatout.frameworks.pytorch.input.items.fused import FusedFetch, following
from flatout.frameworks.pytorch.input.items.in_process import InProcess
from flatout.frameworks.pytorch.input.items.stored import StoredItems
from flatout.frameworks.pytorch.input.read_ahead.owner import ReadAhead

Part: TypeAlias = Literal["fused", "stored", "decoded", "files"]
"""A part of the input pipeline."""


class InputPipeline:
    """All of one process.

    Args:
        store_memory_bytes: Memory for kept items; None: what is free allows.
    """

    def __init__(self, store_memory_bytes: int | None = None) -> None:
        self.fused = FusedFetch()
        self.stored = StoredItems(self.fused, store_memory_bytes)
        self.decoded = Decoding()
        self.files = ReadAhead()

    def engage(self, part: Part, on: bool, *, fill: Iterable[DataLoader[Any]] = ()) -> None:
        """Have a part fetch from now on, or no longer; `fill`: loaders whose items are all kept at once, in a trial."""
        if part == "stored":
            self.stored.engage(on, fill=fill)
        else:
            getattr(self, part).engage(on)

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Have an iterator that fetches in this process ask us."""
        self.fused.attach(loader, iterator)
        self.stored.attach(loader, iterator)
        self.files.attach(loader, iterator)

    def in_process(self, loader: DataLoader[Any], *, fast: bool) -> InProcess:
        """A new pass over a loader with workers, without them; `fast`: where it is known what its items are."""
        return InProcess(loader, self.fused if fast else None, self.stored)

    def following(self, iterator: Any) -> Any:
        """The next batch of an iterator."""
        return following(iterator) if self.fused.engaged or self.stored.engaged else next(iterator)


__all__ = ["InputPipeline", "Part"]
