"""Items computed once and kept: a batch is a gather.

What an item is made of is kept beside it and compared each time (`sources`), so that a dataset that changes is
followed. All items are kept, or none. In: batches of a fetcher, and what their items are made of. Out: batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from flatout.frameworks.pytorch.input.budget import LEAST_FREE_BYTES, may_take_bytes
from flatout.frameworks.pytorch.input.items.sources import Look
from flatout.machine.control_groups import free_memory_bytes

LOOK_EVERY_BYTES = 2**26
"""How often it is seen while the store grows whether memory is still free."""

MOST_CHANGES = 4
"""How often what items are made of may change before nothing is kept any more."""

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Unkept(Exception):
    """A batch that cannot be kept; the message says why."""


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


class Column:
    """One tensor of a batch, for all items that are kept."""

    def __init__(self, first: torch.Tensor, num_rows: int) -> None:
        room = np.empty(num_rows * first[:1].nbytes, np.uint8)  # NumPy asks for large pages
        self.rows = torch.from_numpy(room).view(first.dtype).view(num_rows, *first.shape[1:])
        self.mirror: Any = None
        """The same rows on a device (`transfer.rows`)."""
        self.num_arrived = 0
        """How often a batch of them went to a device."""


class Store:
    """The kept items of one dataset.

    Args:
        num_items: How many items the dataset says it has.
        room: The memory that there is.
    """

    def __init__(self, num_items: int, room: Room | None = None) -> None:
        self.num_items = num_items
        self.num_kept = 0
        self.taken_bytes = 0
        """Memory that is set aside for items."""
        self.why_stopped: str | None = None
        """Why nothing is kept any more."""
        self._room = room or Room()
        self._mark: tuple[Any, ...] | None = None
        self._num_changes = 0
        self._look_at_bytes = LOOK_EVERY_BYTES
        self._columns: list[Column] = []
        self._form: Any = None
        self._made_of: list[Any] = []
        self._place_after = np.zeros(0, np.int32)
        """For each item one more than its place, 0 where it has none: pages that are never used take no memory."""

    def places(self, indices: Sequence[int], look: Look) -> Places | None:
        """Where the items lie; None where one is not there, or is not made of the same any more."""
        if look.mark != self._mark:
            self._forget(look.mark)
        if not self._columns or min(indices) < 0 or max(indices) >= self.num_items:
            return None
        places: Places = self._place_after.take(np.asarray(indices)).astype(np.int64) - 1
        if places.min() < 0:
            return None
        if not all(_are_same(kept, places, rows) for kept, rows in zip(self._made_of, look.rows, strict=True)):
            self._forget(look.mark)
            return None
        return places

    def take(self, places: Places) -> Any:
        """The batch of these places, in memory and in containers of its own."""
        numbers = torch.from_numpy(places)
        return tree_unflatten([column.rows.index_select(0, numbers) for column in self._columns], self._form)

    def told(self, batch: Any, tell: Callable[[torch.Tensor, Column], None]) -> None:
        """Tell of which column each tensor of a batch of kept rows consists."""
        for column, leaf in zip(self._columns, tree_flatten(batch)[0], strict=False):
            tell(leaf, column)

    def put(self, indices: Sequence[int], look: Look, batch: Any) -> None:
        """Keep what is not there yet.

        Raises:
            Unkept: It is no batch that can be kept.
        """
        if self._mark != look.mark or self.why_stopped or min(indices) < 0 or max(indices) >= self.num_items:
            return
        leaves, form = _taken_apart(batch)
        if not self._columns:
            self._make_room(leaves, form, look)
        if self.why_stopped or form != self._form or not all(map(_fits, self._columns, leaves)):
            return
        numbers, which = np.unique(np.asarray(indices), return_index=True)
        which = which[self._place_after[numbers] == 0]
        if not len(which):
            return
        places = slice(self.num_kept, self.num_kept + len(which))
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.rows[places] = leaf[torch.from_numpy(which)]
        for kept, rows in zip(self._made_of, look.rows, strict=True):
            kept[places] = rows[which] if isinstance(rows, np.ndarray) else [rows[number] for number in which]
        self._place_after[np.asarray(indices)[which]] = np.arange(places.start + 1, places.stop + 1)
        self.num_kept = places.stop
        self._mind_memory()

    def _forget(self, mark: tuple[Any, ...] | None) -> None:
        self._num_changes += self._mark is not None
        if self._num_changes > MOST_CHANGES:
            self._stop("what its items are made of changes all the time")
        self._mark, self.num_kept, self.taken_bytes = mark, 0, 0
        self._columns, self._made_of = [], []

    def _stop(self, why: str) -> None:
        self.why_stopped, self.num_kept, self.taken_bytes, self._columns, self._made_of = why, 0, 0, [], []

    def _make_room(self, leaves: list[torch.Tensor], form: Any, look: Look) -> None:
        num = len(leaves[0])
        made_of = sum(rows.nbytes if isinstance(rows, np.ndarray) else 32 * len(rows) for rows in look.rows)
        needed = self.num_items * max(1, (sum(leaf.nbytes for leaf in leaves) + made_of) // num)
        if needed > self._room.free_bytes(self):
            return self._stop("no memory for all items")
        self.taken_bytes, self._form, self._look_at_bytes = needed, form, LOOK_EVERY_BYTES
        self._columns = [Column(leaf, self.num_items) for leaf in leaves]
        self._place_after = np.zeros(self.num_items, np.int32)
        self._made_of = [
            np.empty((self.num_items, *rows.shape[1:]), rows.dtype) if isinstance(rows, np.ndarray)
            else [None] * self.num_items for rows in look.rows
        ]  # fmt: skip

    def _mind_memory(self) -> None:
        if self.num_kept * (self.taken_bytes // self.num_items) < self._look_at_bytes:
            return
        self._look_at_bytes += LOOK_EVERY_BYTES
        free_bytes = free_memory_bytes()
        if free_bytes is not None and free_bytes < LEAST_FREE_BYTES:
            self._stop("memory ran short")


def _are_same(kept: Any, places: Places, rows: Any) -> bool:
    """Whether rows are those that lie at these places, bit for bit."""
    if isinstance(kept, list) or not isinstance(rows, np.ndarray):
        there = [kept[place] for place in places.tolist()]
        return all(type(a) is type(b) and a == b for a, b in zip(there, rows, strict=True))
    if (rows.dtype, rows.shape[1:]) != (kept.dtype, kept.shape[1:]):
        return False
    return bool(kept.take(places, axis=0).tobytes() == np.ascontiguousarray(rows).tobytes())


def _taken_apart(batch: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a batch, in order, and how they are put together.

    Raises:
        Unkept: There is something else in it.
    """
    leaves, form = tree_flatten(batch)
    for leaf in leaves:
        if not _is_dense(leaf):
            raise Unkept(f"a batch with a `{type(leaf).__name__}` in it that is no dense tensor on the CPU")
    if not leaves:
        raise Unkept("a batch without tensors")
    return leaves, form


def _is_dense(value: Any) -> bool:
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    usual = value.is_contiguous() and not value.requires_grad and not value.is_quantized and value.dim() > 0
    return usual and not value.is_conj() and not value.is_neg()


def _fits(column: Column, leaf: torch.Tensor) -> bool:
    return leaf.dtype is column.rows.dtype and leaf.shape[1:] == column.rows.shape[1:]
