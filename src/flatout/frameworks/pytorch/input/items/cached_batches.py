"""Batches from kept items, where it is known that items follow from what they are made of.

A `StoredFetcher` stands before whatever fetches for a loader and asks that for what is not kept yet. In: a loader's
iterator. Out: the same batches.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from flatout.frameworks.pytorch.input.items.fused import FusedFetch, FusedFetcher, Reading, computed
from flatout.frameworks.pytorch.input.items.item_cache import Column, ItemCache, Places, Room
from flatout.frameworks.pytorch.input.items.rows import OneThread, Unvectorised
from flatout.frameworks.pytorch.input.items.shadow import Shadow
from flatout.frameworks.pytorch.input.items.sources import Sources
from flatout.guest.interruptions import is_interruption, let_through

MOST_FAILURES = 8
"""Batches whose items could not be looked at, after which it is no longer tried."""

MOST_FILLING_S = 15.0
"""For so long a trial may compute the items of a dataset beforehand."""

CHUNK = 512
"""Items computed together where nobody waits for a batch."""


class StoredItems:
    """The kept items of all loaders of a process.

    Args:
        fused: What computes items that are not kept.
        most_bytes: Memory for all stores together; None: what is free allows.
    """

    def __init__(self, fused: FusedFetch, most_bytes: int | None = None) -> None:
        self.engaged = False
        self.num_batches = 0
        """Given from what was kept, since it was engaged."""
        self.on_taken: Callable[[torch.Tensor, Column, Places], None] | None = None
        """Told of the tensors of batches that consist of kept rows, and of which."""
        self._room = Room(most_bytes)
        self._fused = fused
        self._keepers: weakref.WeakKeyDictionary[DataLoader[Any], Keeper] = weakref.WeakKeyDictionary()

    def engage(self, on: bool, *, fill: Iterable[DataLoader[Any]] = ()) -> None:
        """From the next fetch on, or no longer; `fill`: loaders whose items are all kept now, in a trial."""
        self.engaged, self.num_batches = on, 0
        for loader in fill if on else ():
            self.keeper(loader).fill_for_trial()

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Put a fetcher of ours before that of an iterator which fetches in this process."""
        fetches_here = type(iterator) is _SingleProcessDataLoaderIter
        if self.engaged and fetches_here and type(iterator._dataset_fetcher) is FusedFetcher:
            iterator._dataset_fetcher = self.fetcher(loader, iterator._dataset_fetcher)

    def fetcher(self, loader: DataLoader[Any], inner: FusedFetcher) -> StoredFetcher:
        """A fetcher that asks `inner` for what is not kept."""
        return StoredFetcher(self, inner, self.keeper(loader))

    def keeper(self, loader: DataLoader[Any]) -> Keeper:
        """What is kept of a loader's dataset."""
        reading = self._fused.reading(loader)
        found = self._keepers.get(loader)
        if found is None or found.reading is not reading:
            found = self._keepers[loader] = Keeper(reading, self._room)
        return found

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool = False) -> str | None:
        """Why the items of a loader cannot be kept, in a few words; None where they can."""
        why = self._fused.why_not(loader, for_workers=for_workers)
        if why is None:
            keeper = self.keeper(loader)
            keeper.begin()
            why = keeper.why_not
        return why


class Keeper:
    """What is kept of one loader's dataset."""

    def __init__(self, reading: Reading, room: Room) -> None:
        self.reading = reading
        self.room = room
        self.why_not: str | None = None
        self.store: ItemCache | None = None
        self.sources: Sources | None = None
        self.shadow = Shadow()
        self.num_failures = 0
        self.lock = threading.Lock()
        """One thread at a time; who finds it taken does without what is kept."""
        self._contents: list[Any] | None = None
        self._begun = False

    def begin(self) -> None:
        """Find out what items are made of, where that was not done."""
        if self._begun:
            return
        self._begun = True
        self.reading.begin()
        program = self.reading.program
        if program is None:
            self.why_not = self.reading.why_not
        elif program.draws:
            self.why_not = "its items are random"
        elif not program.works:
            self.why_not = "items are taken as they lie, and nothing is computed that could be kept"
        elif self.room.most_bytes == 0:
            self.why_not = "`--store-memory 0` keeps nothing"
        else:
            try:
                sources = Sources(program)
                sources.mark(self.reading.dataset)
                self.store = ItemCache(len(self.reading.dataset), self.room)
                self.sources = sources
            except Unvectorised as problem:
                self.why_not = str(problem)
            except Exception as problem:  # noqa: BLE001  a dataset may be of any kind, and plain is always there
                self.why_not = f"{type(problem).__name__} when it was looked at"
                let_through(problem)

    def begin_pass(self, dataset: Any) -> None:
        """See whether something was written into the arrays and lists that items are taken from."""
        assert self.sources is not None and self.store is not None
        contents = self.sources.contents(dataset)
        if self._contents is not None and contents != self._contents:
            self.store.forget()
        self._contents = contents

    def fill_for_trial(self) -> None:
        """Keep all items now, so that a trial sees what later passes will be like."""
        self.begin()
        store, program, sources, dataset = self.store, self.reading.program, self.sources, self.reading.dataset
        if store is None or program is None or sources is None:
            return
        begun_s = time.perf_counter()
        try:
            self.begin_pass(dataset)
            for first in range(0, store.num_items, CHUNK):
                indices = list(range(first, min(first + CHUNK, store.num_items)))
                mark = sources.mark(dataset)
                if store.places(indices, mark) is None:
                    self.put(store, indices, mark, computed(program, dataset, indices))
                if (time.perf_counter() - begun_s) * store.num_items > MOST_FILLING_S * (first + CHUNK):
                    self.set_aside("to compute all items once takes longer than a trial has")
                if self.store is None:
                    return
        except Exception as problem:  # noqa: BLE001  whatever it is, plain is there
            self.set_aside(f"{type(problem).__name__} when its items were computed")

    def put(self, store: ItemCache, indices: Sequence[int], mark: Any, batch: Any) -> None:
        """Keep the items of a batch, where they can be."""
        try:
            store.put(indices, mark, batch)
        except Exception as problem:  # noqa: BLE001  the batch is there, whatever becomes of the others
            let_through(problem)
            self.set_aside(f"a batch could not be kept: {problem}")
        if store.why_stopped:
            self.set_aside(store.why_stopped)

    def set_aside(self, why: str) -> None:
        """Never again."""
        self.store, self.why_not = None, why


class StoredFetcher:
    """What an iterator asks for the batch of some indices."""

    def __init__(self, owner: StoredItems, inner: FusedFetcher, keeper: Keeper) -> None:
        self._owner = owner
        self._inner = inner
        self._keeper = keeper
        self._begun = False

    def fetch(self, indices: Any) -> Any:
        """The batch."""
        inner, keeper = self._inner, self._keeper
        if not self._owner.engaged or type(indices) is not list or set(map(type, indices)) != {int}:
            return inner.fetch(indices)
        keeper.begin()
        if keeper.store is None or keeper.reading.program is None or not keeper.lock.acquire(blocking=False):
            return inner.fetch(indices, always=True)
        try:
            return self._fetched(keeper.store, indices)
        except BaseException as problem:
            if is_interruption(problem):
                keeper.set_aside("a signal came while its items were being kept")
            raise
        finally:
            keeper.lock.release()

    def _fetched(self, store: ItemCache, indices: list[int]) -> Any:
        inner, keeper = self._inner, self._keeper
        assert keeper.sources is not None
        try:
            if not self._begun:
                self._begun = True
                keeper.begin_pass(inner.dataset)
            mark = keeper.sources.mark(inner.dataset)
            places = store.places(indices, mark)
        except Exception as problem:  # noqa: BLE001  whatever it is, plain is there
            let_through(problem)
            keeper.num_failures += 1
            if keeper.num_failures >= MOST_FAILURES:
                keeper.set_aside(f"{MOST_FAILURES} batches could not be kept: {problem}")
            return inner.fetch(indices, always=True)
        if places is None:
            batch = inner.fetch(indices, always=True)
            if inner.known:  # what the program gives is what is looked at, and not what the script did in its place
                keeper.put(store, indices, mark, batch)
            return batch
        with OneThread():
            batch = store.take(places)
        given, tell = self._shadowed(batch, indices), self._owner.on_taken
        if tell is not None and given is batch:
            store.told(batch, lambda tensor, column: tell(tensor, column, places))
        return given

    def _shadowed(self, batch: Any, indices: list[int]) -> Any:
        """The batch, or the script's own where it is to be that."""
        keeper, plain, shadow = self._keeper, self._inner.original.fetch, self._keeper.shadow
        if shadow.first:
            own = plain(indices)
            if why := shadow.of_batch(batch, own):
                keeper.set_aside(f"kept batches differ: {why}")
            return own
        due = shadow.any_due(len(indices))
        if due and (why := shadow.of_items(batch, indices, lambda place: plain([indices[place]]))):
            keeper.set_aside(f"kept batches differ: {why}")
            return self._inner.plain(indices)
        self._owner.num_batches += 1
        return batch
