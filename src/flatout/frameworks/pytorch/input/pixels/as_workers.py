"""Batches of images that the script's workers would build, with their pixel work on threads of this process.

Each worker's random numbers are its own, and nobody else draws from them. So the next batch is begun as soon as one is
given, and no guess is needed. In: a loader with workers. Out: an iterator.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.items.fused import SetAsideError
from flatout.frameworks.pytorch.input.items.in_process import InProcess, default_dtype
from flatout.frameworks.pytorch.input.items.rows import OneThread
from flatout.frameworks.pytorch.input.items.worker_streams import WorkerStreams, aside
from flatout.frameworks.pytorch.input.pixels.fetching import Pending
from flatout.frameworks.pytorch.input.pixels.owner import PixelThreads
from flatout.guest.interruptions import is_interruption


class PixelsInProcess(InProcess):
    """One pass over a loader with workers, without them."""

    def __init__(self, loader: DataLoader[Any], pixels: PixelThreads) -> None:
        super().__init__(loader, None)
        self._pixels = pixels.fetcher(loader, self._fetcher, in_process=True)
        self._worker_streams = WorkerStreams(int(self._base_seed), self._num_workers)
        self._begun: Pending | None = None

    def _next_data(self) -> Any:
        batch = super()._next_data()
        if self._ahead:
            with default_dtype(self._dtype):
                self._begun = self._begin((self._num_yielded + 1) % self._num_workers, self._ahead[0])
        return batch

    def _as_worker(self, number: int, indices: Any) -> Any:
        begun, self._begun = self._begun, None
        pending = begun or self._begin(number, indices)
        try:
            with aside(), OneThread():  # what is computed both ways draws its numbers again
                return self._pixels.finish(pending)
        except BaseException as problem:
            if is_interruption(problem):  # the batch is asked for again
                self._worker_streams.put_back(number, pending.before)
            raise

    def _begin(self, number: int, indices: Any) -> Pending:
        """Draw the numbers of a worker's next batch, and have the rest begun.

        Raises:
            SetAsideError: It is left to the script's workers.
        """
        with self._worker_streams.of(number), OneThread():
            pending = self._pixels.begin(indices)
        if pending is None:
            raise SetAsideError(self._pixels.standing.why_not or "the batch is of another kind")
        return pending
