"""Items computed once and kept: a batch is a gather.

What an item is made of is kept beside it and compared each time (`sources`), so that a dataset that changes is
followed. Memory is taken as long as enough is free, for ever the same items; what does not fit is computed each time.
Where the store is kept on the disk (`kept`), rows are appended there and read through memory; as soon as that ends, or
an item changes, what comes is kept in memory. In: batches of a fetcher, and what their items are made of. Out: the same
batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flatout.frameworks.pytorch.input.budget import LEAST_FREE_BYTES, may_take_bytes
from flatout.frameworks.pytorch.input.items.columns import Column, Columns, Places, like, num_bytes, rows_of
from flatout.frameworks.pytorch.input.items.integers import whole
from flatout.frameworks.pytorch.input.items.kept import Kept
from flatout.frameworks.pytorch.input.items.sources import Look
from flatout.guest.interruptions import let_through
from flatout.machine.control_groups import free_memory_bytes
from flatout.records.store_state import Part, State

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
        keep: Makes the store's counterpart on the disk, given how many items of so many bytes memory has room for.
    """

    def __init__(
        self,
        num_items: int,
        room: Room | None = None,
        keep: Callable[[Callable[[int], int]], Kept] | None = None,
    ) -> None:
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
        self._may_change = True
        """Whether there is memory for items that have changed."""
        self._kept = keep(_Asked(self)) if keep else None
        if self._kept is not None:
            weakref.finalize(self, self._kept.finish)

    @property
    def taken_bytes(self) -> int:
        """Memory that is set aside for items."""
        return (self.capacity or 0) * self._item_bytes if self._columns is not None else 0

    def places(self, indices: Sequence[int], look: Look) -> Places | None:
        """Where the items lie, -1 for those that are not there, or are not made of the same any more; None: nowhere."""
        if look.mark != self._mark:
            self._forget(look)
        numbers = look.numbers if look.numbers is not None else whole(indices)
        known = type(numbers.data) is np.ndarray and numbers.least >= 0 and numbers.most < self.num_items
        if self._columns is None or not known:
            return None
        places = self._places_of(numbers.data)
        if self._kept is not None and not self._kept.sound(places):
            self._kept.lose("its rows were torn")
            self._empty()
            return None
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

    def count(self) -> None:
        """Have what is on the disk by now count, for this process may be killed any time."""
        if self._kept is not None:
            with contextlib.suppress(OSError):  # said when it comes to an end
                self._kept.count()

    def abandon(self, why: str) -> None:
        """Give none of it, and keep no more; what counts on the disk by now stays there."""
        self.capacity, self.why_stopped = 0, why
        self._empty()
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.leave(why)

    def disown(self) -> None:
        """What is kept is not what the script gives."""
        self._empty()
        if self._kept is not None:
            self._kept.disown()

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
        if len(which) and self._kept is not None and self._kept.writes:
            self._kept.leave("items have changed")
            self._go_on_in_memory()
        if len(which) and self._may_change:
            self._write(places[which], which, batch, look)

    def _write(self, places: Places | slice, which: Places, batch: Any, look: Look) -> None:
        assert self._columns is not None
        self._columns.put(places, batch, which)
        for kept, rows in zip(self._made_of, look.rows, strict=True):
            kept.put(places, rows, which)

    def _add(self, numbers: Places, which: Places, batch: Any, look: Look) -> None:
        """Keep new items, on the disk as long as that is possible."""
        on_disk = self._append(numbers[which], which, batch, look)
        which = which[: (self.capacity or 0) - self.num_kept]  # which may have become less by now
        after = self.num_kept + len(which)
        if len(which) and not on_disk:
            self._write(slice(self.num_kept, after), which, batch, look)
        self._place_after[numbers[which]] = np.arange(self.num_kept + 1, after + 1)
        self.num_kept = after
        self._mind_memory()

    def _append(self, items: Places, which: Places, batch: Any, look: Look) -> bool:
        """Write new rows to the disk; False where they belong into memory."""
        kept = self._kept
        if kept is None or not kept.there:
            return False
        if kept.writes and kept.append(items, [*self._raw(look, which), *rows_of(batch, which)]):
            return True
        if not kept.in_memory:
            self._go_on_in_memory()
        return False

    def _raw(self, look: Look, which: Places) -> list[np.ndarray]:
        return [kept.raw(rows, which) for kept, rows in zip(self._made_of, look.rows, strict=True)]

    def _forget(self, look: Look) -> None:
        first = self._mark is None
        self._num_changes += not first
        if self._num_changes > MOST_CHANGES:
            self.capacity, self.why_stopped = 0, "what its items are made of changes all the time"
        self._mark = look.mark
        self._empty()
        if self._kept is not None:
            if first:
                self._resume(look)
            else:
                self._kept.leave("what goes into all of its items has changed since")
                self._kept = None

    def _empty(self) -> None:
        if self.num_kept:
            self._place_after = np.zeros(self.num_items, np.int32)
        self._columns, self._made_of, self.num_kept = None, [], 0

    def _resume(self, look: Look) -> None:
        """Go on with what lies on the disk."""
        kept = self._kept
        if kept is None:
            return
        try:
            state = kept.resume()
            if state is not None:
                self._lie_on(kept, state, look)
        except Exception as problem:  # noqa: BLE001  whatever lies there, memory is always there
            let_through(problem)
            kept.lose(f"{type(problem).__name__} when it was opened")
            self._empty()

    def _lie_on(self, kept: Kept, state: State, look: Look) -> None:
        """Have the rows of a store on the disk for those that are kept."""
        columns = [part for part in state.parts if part.name.startswith("column-")]
        rooms = kept.rooms
        num_made_of = len(rooms) - len(columns)
        self._columns = Columns(like(state.form, columns), state.capacity, rooms[num_made_of:])
        self._made_of = [
            _Rows(rows, state.capacity, room) for rows, room in zip(look.rows, rooms[:num_made_of], strict=True)
        ]
        self._item_bytes = sum(part.row_bytes for part in state.parts)
        items = kept.items()
        self._place_after[items] = np.arange(1, len(items) + 1)
        self.num_kept, self.capacity = len(items), state.capacity
        self.why_stopped = None if self.capacity == self.num_items else "no room for more"
        if not kept.writes:
            self._go_on_in_memory()

    def _go_on_in_memory(self) -> None:
        """The disk takes no more: memory has what comes, as far as there is room."""
        left = self.rows_for(self._item_bytes)
        if self._kept is None or not self._kept.go_on_in_memory():
            left = 0
        self._may_change = left >= self.num_kept
        self.capacity = min(self.capacity or 0, self.num_kept + left)

    def rows_for(self, item_bytes: int) -> int:
        """For how many items of this size memory has room."""
        return self._room.free_bytes(self) // item_bytes

    def _make_room(self, batch: Any, look: Look, num_rows: int) -> None:
        self._item_bytes = max(1, (num_bytes(batch) + sum(map(_num_bytes, look.rows))) // num_rows)
        self.capacity = min(self.num_items, self.rows_for(self._item_bytes))
        self.why_stopped = None if self.capacity == self.num_items else "no memory for more"
        self._look_at_bytes = LOOK_EVERY_BYTES
        if not self.capacity:
            return
        rooms: list[Any] = []
        if self._kept is not None:
            made_of = [_part(number, rows) for number, rows in enumerate(look.rows)]
            if on_disk := self._kept.begin(batch, made_of, self.capacity, self.num_items):
                rooms = self._kept.rooms
                if on_disk < self.capacity:
                    self.capacity, self.why_stopped = on_disk, "no room on the disk for more"
        num = len(look.rows)
        self._columns = Columns(batch, self.capacity, rooms[num:])
        self._made_of = [_Rows(rows, self.capacity, rooms[i] if rooms else None) for i, rows in enumerate(look.rows)]

    def _mind_memory(self) -> None:
        on_disk = self._kept is not None and self._kept.writes
        if on_disk and self._kept is not None and self._kept.full:
            self.capacity, self.why_stopped = self.num_kept, "the disk is nearly full"
            self._kept.leave(self.why_stopped)
        if on_disk or self.num_kept * self._item_bytes < self._look_at_bytes:
            return
        self._look_at_bytes += LOOK_EVERY_BYTES
        free_bytes = free_memory_bytes()
        if free_bytes is not None and free_bytes < LEAST_FREE_BYTES:
            self.capacity, self.why_stopped = self.num_kept, "memory ran short"


class _Asked:
    """Asks a store for how many items memory has room, and does not keep it alive."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)

    def __call__(self, item_bytes: int) -> int:
        store = self._store()
        return 0 if store is None else store.rows_for(item_bytes)


class _Rows:
    """What kept items are made of, one row for each."""

    def __init__(self, first: Any, num_rows: int, room: np.ndarray | None = None) -> None:
        self._rows: Any = None
        self._digests = False
        """Whether a digest stands for each value of a list, as on the disk."""
        if room is not None and not isinstance(first, np.ndarray):
            self._rows, self._digests = room.reshape(num_rows, -1), True
        elif room is not None:
            self._rows = room.reshape(-1).view(first.dtype).reshape(num_rows, *first.shape[1:])
        elif isinstance(first, np.ndarray):
            self._rows = np.empty((num_rows, *first.shape[1:]), first.dtype)
        else:
            self._rows = [None] * num_rows

    def same(self, places: Places, rows: Any) -> np.ndarray:
        """Which of the rows are those that lie at these places, bit for bit."""
        if self._digests:
            rows = _digests(rows)
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

    def raw(self, rows: Any, which: Places) -> np.ndarray:
        """Some of the rows, as they lie on the disk."""
        return _digests([rows[number] for number in which.tolist()]) if self._digests else rows[which]

    def put(self, places: Places | slice, rows: Any, which: Places) -> None:
        """Keep some of the rows."""
        if isinstance(self._rows, list):
            numbers = range(places.start, places.stop) if isinstance(places, slice) else places.tolist()
            for place, number in zip(numbers, which.tolist(), strict=True):
                self._rows[place] = rows[number]
        else:
            self._rows[places] = self.raw(rows, which)


def _digests(values: Any) -> np.ndarray:
    """A row of 16 bytes for each of Python's own values."""
    found = b"".join(
        hashlib.blake2b(f"{type(one).__name__} {one!r}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        for one in values
    )
    return np.frombuffer(found, np.uint8).reshape(len(values), 16)


def _part(number: int, rows: Any) -> Part:
    """The file for one of the rows that items are made of."""
    name = f"made-{number}"
    if not isinstance(rows, np.ndarray):
        return Part(name=name, dtype="digest", shape=(16,), row_bytes=16)
    return Part(name=name, dtype=rows.dtype.str, shape=tuple(rows.shape[1:]), row_bytes=rows[:1].nbytes)


def _num_bytes(rows: Any) -> int:
    return int(rows.nbytes) if isinstance(rows, np.ndarray) else 32 * len(rows)
