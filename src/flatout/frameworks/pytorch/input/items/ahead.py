"""The next batch begun while the training computes.

With no workers the loader and the training share one random stream. So the next batch's random numbers are drawn on a
guess, that the training draws none meanwhile, and the stream is put back. When the batch is asked for, the stream
stands where it stood, or the guess was wrong and the batch is begun again. Which items come next is asked of the
sampler one batch early, where nobody can tell. In: a loader's iterator whose fetcher can begin a batch. Out: the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from flatout.frameworks.pytorch.input.pixels.owner import PixelThreads
from flatout.frameworks.pytorch.input.shuffles import why_not_ahead
from flatout.frameworks.pytorch.seams.random_states import RandomStates

MOST_MISSES = 3
"""Wrong guesses one after another, after which a pass guesses no more: the training draws in every step."""


class Begun(Protocol):
    """A batch under way."""

    after: RandomStates | None

    def holds(self) -> bool:
        """Whether everything that it was begun with is still as it was."""

    def drop(self) -> None:
        """Nobody wants it any more."""


class Beginner(Protocol):
    """A fetcher that can begin a batch and finish it later."""

    def fetch(self, indices: Any) -> Any:
        """A whole batch."""

    def begin(self, indices: Any, *, states: bool = False) -> Any:
        """Draw a batch's random numbers and have the rest begun; None where that cannot be."""

    def finish(self, pending: Any) -> Any:
        """The batch."""


class Peeked:
    """A sampler's iterator that can be asked what comes next.

    A shuffle with a generator of the script's draws from it once more where its order ends: the generator moves when
    the script gets there.
    """

    def __init__(self, inner: Iterator[Any], sampler: Any) -> None:
        self.inner = inner
        self._sampler = sampler if type(sampler) is RandomSampler and sampler.generator is not None else None
        self._next: tuple[Any, Exception | None] | None = None
        self._drew = False

    def __iter__(self) -> Peeked:
        return self

    def __next__(self) -> Any:
        if self._next is None:
            return next(self.inner)
        (value, problem), self._next = self._next, None
        if self._drew and self._sampler is not None:
            torch.randperm(len(self._sampler.data_source), generator=self._sampler.generator)
        if problem is not None:
            raise problem
        return value

    def peek(self) -> Any:
        """What comes next; None where nothing does, or asking for it raises: `next` will raise it."""
        if self._next is None:
            generator = self._sampler.generator if self._sampler is not None else None
            before = generator.get_state() if generator is not None else None
            try:
                self._next = next(self.inner), None
            except Exception as problem:  # noqa: BLE001  it is raised when the script asks
                self._next = None, problem
            if generator is not None and before is not None:
                self._drew = not torch.equal(before, generator.get_state())
                generator.set_state(before)
        return self._next[0]


class Ahead:
    """All loaders of a process whose next batch can be begun early."""

    def __init__(self, pixels: PixelThreads) -> None:
        self.engaged = False
        self.num_batches = 0
        """Given of those that had been begun, since it was engaged."""
        self._pixels = pixels

    def engage(self, on: bool) -> None:
        """From the next fetch on, or no longer."""
        self.engaged, self.num_batches = on, 0
        self._pixels.engage(on, wanted_by="prefetch")

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Put a fetcher of ours before one that can begin a batch."""
        if not self.engaged or type(iterator) is not _SingleProcessDataLoaderIter:
            return
        if self._pixels.fetches(iterator) and why_not_ahead(loader) is None:
            iterator._sampler_iter = Peeked(iterator._sampler_iter, loader.sampler)
            iterator._dataset_fetcher = AheadFetcher(self, iterator._dataset_fetcher, iterator._sampler_iter)

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool = False) -> str | None:
        """Why a loader's batches cannot be begun early, in a few words; None where they can."""
        return self._pixels.why_not(loader, for_workers=for_workers) or why_not_ahead(loader)


class AheadFetcher:
    """What an iterator asks for the batch of some indices, which has been begun."""

    def __init__(self, owner: Ahead, inner: Beginner, peeked: Peeked) -> None:
        self._owner = owner
        self._inner = inner
        self._peeked = peeked
        self._pending: Begun | None = None
        self._of: Any = None
        """The indices of the batch that has been begun."""
        self._before: RandomStates | None = None
        self._num_misses = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while being copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def fetch(self, indices: Any) -> Any:
        """The batch."""
        pending = self._guessed(indices)
        batch = self._inner.fetch(indices) if pending is None else self._inner.finish(pending)
        if self._owner.engaged and self._num_misses < MOST_MISSES:
            self._begin_next()
        return batch

    def _guessed(self, indices: Any) -> Begun | None:
        """The batch that was begun for these indices, if the guess was right; random states are then as after it."""
        pending, before, self._pending, self._before = self._pending, self._before, None, None
        if pending is None or before is None:
            return None
        if pending.after is not None and self._of is indices:
            if before.equals(RandomStates()) and pending.holds():
                pending.after.restore()
                self._num_misses = 0
                self._owner.num_batches += 1
                return pending
            self._num_misses += 1
        pending.drop()
        return None

    def _begin_next(self) -> None:
        indices = self._peeked.peek()
        if indices is None:
            return
        before = RandomStates()
        try:
            self._pending, self._of, self._before = self._inner.begin(indices, states=True), indices, before
        finally:
            before.restore()
