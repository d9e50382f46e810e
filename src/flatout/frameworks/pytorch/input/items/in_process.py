"""Batches that the script's workers would build, computed in this process.

Workers are there because building a batch is slow. Where it is computed at once it is not, and handing it from a
process to another costs more than it does. Seeds and indices are drawn when the workers' iterator draws them: some
batches ahead at the start, then one for each batch that is given. Batches go to workers in turn, each of which has a
random stream of its own: so here. In: a loader with workers. Out: an iterator.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from flatout.frameworks.pytorch.input.items.cached_batches import StoredItems
from flatout.frameworks.pytorch.input.items.fused import FusedFetch, FusedFetcher, SetAsideError
from flatout.frameworks.pytorch.input.items.snapshot import copied
from flatout.frameworks.pytorch.input.plain_iterator import Recorded
from flatout.guest.caller_frames import caller_in


class InProcess(Recorded, _BaseDataLoaderIter):
    """One pass over a loader with workers, without them.

    `fused` computes the batches at once; without it they are put together item by item. From a copy of the dataset,
    such as each worker has: see `snapshot`.
    """

    def __init__(self, loader: DataLoader[Any], fused: FusedFetch | None, stored: StoredItems | None = None) -> None:
        caller_in(_MultiProcessingDataLoaderIter.__init__, "super().__init__(loader)")(super().__init__, loader)
        self._dataset = copied(self._dataset)
        self._fetcher: Any = _MapDatasetFetcher(self._dataset, self._auto_collation, self._collate_fn, self._drop_last)
        self._reading = fused.reading(loader) if fused is not None else None
        if fused is not None and self._reading is not None:
            self._fetcher = FusedFetcher(fused, self._fetcher, self._reading, in_process=True)
            if stored is not None:
                self._fetcher = stored.fetcher(loader, self._fetcher)
        self._ahead: deque[Any] = deque()
        self._num_ahead = (loader.prefetch_factor or 2) * self._num_workers
        self._reset(loader, first_iter=True)  # as the workers' iterator does, which asks the sampler twice
        first = int(self._base_seed)
        self._streams = [torch.Generator().manual_seed(first + n).get_state() for n in range(self._num_workers)]
        """Where each worker's random stream stands."""

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self.begin_record()
        self._ahead.clear()
        for _ in range(self._num_ahead):
            self._draw()

    def _draw(self) -> None:
        try:
            self._ahead.append(self._next_index())
        except StopIteration:
            return

    def _next_data(self) -> Any:  # type: ignore[override]
        if not self._ahead:
            raise StopIteration
        batch = self._as_worker(self._num_yielded % self._num_workers, self._ahead[0])
        reading = self._reading
        if reading is not None and reading.program is None:  # whatever was not seen, workers see it as plain's do
            raise SetAsideError(reading.why_not)
        self._ahead.popleft()
        self._draw()
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _as_worker(self, number: int, indices: Any) -> Any:
        """The batch, with the random numbers that a worker draws for it."""
        program = self._reading.program if self._reading is not None else None
        if program is None or not program.draws:
            return self._fetcher.fetch(indices)
        own = torch.get_rng_state()
        torch.set_rng_state(self._streams[number])
        try:
            batch = self._fetcher.fetch(indices)
            self._streams[number] = torch.get_rng_state()  # not where it was interrupted, and is asked for again
        finally:
            torch.set_rng_state(own)
        return batch
