"""The parts of the input pipeline, and which of them are engaged.

In: loaders' iterators. Out: the same iterators, which ask the engaged parts for their batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.items.ahead import Ahead
from flatout.frameworks.pytorch.input.items.fused import FusedFetch, following
from flatout.frameworks.pytorch.input.items.in_process import InProcess
from flatout.frameworks.pytorch.input.items.stored import StoredItems
from flatout.frameworks.pytorch.input.pixels.owner import PixelThreads
from flatout.frameworks.pytorch.input.read_ahead.owner import ReadAhead

Part: TypeAlias = Literal["fused", "stored", "pixels", "ahead", "decoded", "files"]
"""A part of the input pipeline."""


class InputPipeline:
    """All of one process.

    Args:
        store_memory_bytes: Memory for kept items; None: what is free allows.
    """

    def __init__(self, store_memory_bytes: int | None = None) -> None:
        self.fused = FusedFetch()
        self.stored = StoredItems(self.fused, store_memory_bytes)
        self.pixels = PixelThreads(self.fused)
        self.ahead = Ahead(self.pixels)
        self.files = ReadAhead()
        self.workers = InPlaceOfWorkers(self.fused, self.stored, self.pixels)

    def engage(self, part: Part, on: bool, *, fill: Iterable[DataLoader[Any]] = ()) -> None:
        """Have a part fetch from now on, or no longer; `fill`: loaders whose items are all kept at once, in a trial."""
        if part == "stored":
            self.stored.engage(on, fill=fill)
        elif part == "decoded":
            self.pixels.decoded.engage(on)
            self.pixels.engage(on, wanted_by="decoded_store")
        else:
            getattr(self, part).engage(on)

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Have an iterator that fetches in this process ask us."""
        self.fused.attach(loader, iterator)
        self.stored.attach(loader, iterator)
        self.pixels.attach(loader, iterator)
        self.files.attach(loader, iterator)
        self.ahead.attach(loader, iterator)

    def following(self, iterator: Any) -> Any:
        """The next batch of an iterator."""
        return following(iterator) if self.fused.engaged or self.stored.engaged else next(iterator)


class InPlaceOfWorkers:
    """Passes over loaders with workers, without them."""

    def __init__(self, fused: FusedFetch, stored: StoredItems, pixels: PixelThreads) -> None:
        self._fused = fused
        self._stored = stored
        self._pixels = pixels

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool = True) -> str | None:
        """Why a loader's batches cannot be built here faster than item by item, in a few words; None where they can."""
        fused = self._fused.why_not(loader, for_workers=for_workers)
        if fused is None:
            return None
        pixels = self._pixels.why_not(loader, for_workers=for_workers)
        return pixels if pixels is None or "PIL.Image" in sys.modules else fused

    def begin(self, loader: DataLoader[Any], *, fast: bool) -> InProcess:
        """A new pass; `fast`: where it can be faster than item by item."""
        if fast and self._fused.why_not(loader, for_workers=True) is not None:
            from flatout.frameworks.pytorch.input.pixels.as_workers import PixelsInProcess

            return PixelsInProcess(loader, self._pixels)
        return InProcess(loader, self._fused if fast else None, self._stored)


__all__ = ["InputPipeline", "Part"]
