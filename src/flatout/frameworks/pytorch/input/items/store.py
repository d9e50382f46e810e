"""Items computed once and kept: a batch is a gather.

What an item is made of is kept beside it and compared each time (`sources`), so that a dataset that changes is
followed. Memory is taken as long as enough is free, for ever the same items; what does not fit is computed each time.
In: batches of a fetcher, and what their items are made of. Out: the same batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flatout.frameworks.pytorch.input.budget import LEAST_FREE_BYTES, may_take_bytes
from flatout.frameworks.pytorch.input.items.columns import Column, Columns, Places, num_bytes
from flatout.frameworks.pytorch.input.items.integers import whole
from flatout.frameworks.pytorch.input.items.sources import Look
from flatout.machine.control_groups import free_memory_bytes

LOOK_EVERY_BYTES = 2**26
"""How often it is seen while the store grows whether memory is still free."""

MOST_CHANGES = 4
"""How often what all items share may change before nothing is kept any more."""


class Room:
    """Memory for all stores of a process.

    Args:
        most_bytes: How much they may take together; None: for each what the machine's free memory allows.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()

    def free_bytes(self, store: Store) -> int:
        """What a store may take."""
        self._stores.add(store)
        if self.most_bytes is not None:
            return max(0, self.most_bytes - sum(one.taken_bytes for one in self._stores if one is not store))
        return may_take_bytes(free_memory_bytes())


class Store:
    """The kept items of one dataset.

    Args:
        num_items: How many items the dataset says it has.
        room: The memory that there is.
    """

    def __init__(self, num_items: int, room: Room | None = None) -> None:
        self.num_items = num_items
        self.num_kept = 0
        self.capacity: int | None = None
        """Items for which there is room; known with the first."""
        self.why_stopped: str | None = None
        """Why nothing is added any more."""
        self._room = room or Room()
        self._place_after = np.zeros(num_items, np.int32)
        """For each item one more than its place, 0 where it has none: pages that are never used take no memory."""
        self._mark: tuple[Any, ...] | None = None
        self._num_changes = 0
        self._columns: Columns | None = None
        self._made_of: list[_Rows] = []
        self._item_bytes = 1
        self._look_at_bytes = LOOK_EVERY_BYTES

    @property
    def taken_bytes(self) -> int:
        """Memory that is set aside for items."""
        return (self.capacity or 0) * self._item_bytes if self._columns is not None else 0

    def places(self, indices: Sequence[int], look: Look) -> Places | None:
        """Where the items lie, -1 for those that are not there, or are not made of the same any more; None: nowhere."""
        if look.mark != self._mark:
            self._forget(look.mark)
        numbers = look.numbers if look.numbers is not None else whole(indices)
        known = type(numbers.data) is np.ndarray and numbers.least >= 0 and numbers.most < self.num_items
        if self._columns is None or not known:
            return None
        places = self._places_of(numbers.data)
        for kept, rows in zip(self._made_of, look.rows, strict=True):
            same = kept.same(places, rows)
            if not same.all():
                places[~same] = -1
        return places

    def _places_of(self, indices: Any) -> Places:
        return self._place_after.take(indices).astype(np.int64) - 1

    def take(self, places: Places, missing: Any = None) -> Any:
        """The batch of these places; `missing` has the rows for those that are -1."""
        assert self._columns is not None
        return self._columns.take(places, missing)

    def told(self, batch: Any, tell: Callable[[Any, Column], None]) -> None:
        """Tell of which column each tensor of a batch of kept rows consists."""
        if self._columns is not None:
            self._columns.told(batch, tell)

    def put(self, indices: Sequence[int], look: Look, batch: Any) -> None:
        """Keep what is not there yet, as far as there is room.

        Raises:
            Unkept: It is no batch that can be kept.
        """
        if self._mark != look.mark or min(indices) < 0 or max(indices) >= self.num_items:
            return
        if self._columns is None and self.capacity != 0:
            self._make_room(batch, look, len(indices))
        if self._columns is None or self.capacity is None or not self._columns.fits(batch):
            return
        numbers = np.asarray(indices)
        places = self._places_of(numbers)
        if places.max() >= 0:
            self._replace_changed(places, look, batch)
        which = np.flatnonzero(places < 0) if len(set(indices)) == len(indices) else self._first_of(numbers)
        which = which[: self.capacity - self.num_kept]
        if len(which):
            self._add(numbers, which, batch, look)

    def _first_of(self, numbers: Places) -> Places:
        """Which rows are those of items that are not there yet, each item once."""
        _, which = np.unique(numbers, return_index=True)
        return which[self._place_after[numbers[which]] == 0]

    def _replace_changed(self, places: Places, look: Look, batch: Any) -> None:
        """Items that have changed are kept as they are now."""
        stale = np.zeros(len(places), bool)
        for kept, rows in zip(self._made_of, look.rows, strict=True):
            stale |= ~kept.same(places, rows)
        which = np.flatnonzero(stale & (places >= 0))
        if len(which):
            self._write(places[which], which, batch, look)

    def _write(self, places: Places | slice, which: Places, batch: Any, look: Look) -> None:
        assert self._columns is not None
        self._columns.put(places, batch, which)
        for kept, rows in zip(self._made_of, look.rows, strict=True):
            kept.put(places, rows, which)

    def _add(self, numbers: Places, which: Places, batch: Any, look: Look) -> None:
        """Keep new items."""
        after = self.num_kept + len(which)
        self._write(slice(self.num_kept, after), which, batch, look)
        self._place_after[numbers[which]] = np.arange(self.num_kept + 1, after + 1)
        self.num_kept = after
        self._mind_memory()

    def _forget(self, mark: tuple[Any, ...]) -> None:
        self._num_changes += self._mark is not None
        if self._num_changes > MOST_CHANGES:
            self.capacity, self.why_stopped = 0, "what its items are made of changes all the time"
        self._mark = mark
        if self.num_kept:
            self._place_after = np.zeros(self.num_items, np.int32)
        self._columns, self._made_of, self.num_kept = None, [], 0

    def _make_room(self, batch: Any, look: Look, num_rows: int) -> None:
        self._item_bytes = max(1, (num_bytes(batch) + sum(map(_num_bytes, look.rows))) // num_rows)
        self.capacity = min(self.num_items, self._room.free_bytes(self) // self._item_bytes)
        self.why_stopped = None if self.capacity == self.num_items else "no memory for more"
        self._look_at_bytes = LOOK_EVERY_BYTES
        if not self.capacity:
            return
        self._columns = Columns(batch, self.capacity)
        self._made_of = [_Rows(rows, self.capacity) for rows in look.rows]

    def _mind_memory(self) -> None:
        if self.num_kept * self._item_bytes < self._look_at_bytes:
            return
        self._look_at_bytes += LOOK_EVERY_BYTES
        free_bytes = free_memory_bytes()
        if free_bytes is not None and free_bytes < LEAST_FREE_BYTES:
            self.capacity, self.why_stopped = self.num_kept, "memory ran short"


class _Rows:
    """What kept items are made of, one row for each."""

    def __init__(self, first: Any, num_rows: int) -> None:
        is_array = isinstance(first, np.ndarray)
        self._rows: Any = np.empty((num_rows, *first.shape[1:]), first.dtype) if is_array else [None] * num_rows

    def same(self, places: Places, rows: Any) -> np.ndarray:
        """Which of the rows are those that lie at these places, bit for bit."""
        if isinstance(self._rows, list) or not isinstance(rows, np.ndarray):
            kept = [self._rows[place] if place >= 0 else None for place in places.tolist()]
            return np.array([type(a) is type(b) and a == b for a, b in zip(kept, rows, strict=True)], bool)
        if rows.dtype != self._rows.dtype or rows.shape[1:] != self._rows.shape[1:]:
            return np.zeros(len(rows), bool)
        kept = self._rows.take(places, axis=0, mode="clip")
        if kept.tobytes() == np.ascontiguousarray(rows).tobytes():
            return np.ones(len(rows), bool)
        flat = [np.ascontiguousarray(one).reshape(len(rows), -1).view(np.uint8) for one in (kept, rows)]
        return (flat[0] == flat[1]).all(axis=1)

    def put(self, places: Places | slice, rows: Any, which: Places) -> None:
        """Keep some of the rows."""
        if isinstance(self._rows, list):
            numbers = range(places.start, places.stop) if isinstance(places, slice) else places.tolist()
            for place, number in zip(numbers, which.tolist(), strict=True):
                self._rows[place] = rows[number]
        else:
            self._rows[places] = rows[which]


def _num_bytes(rows: Any) -> int:
    return int(rows.nbytes) if isinstance(rows, np.ndarray) else 32 * len(rows)
