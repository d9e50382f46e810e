"""Items computed once and kept: a batch is a gather.

They are kept as long as what they are made of stays the same (`sources`), and all of them, or none. In: batches of a
fetcher, and marks of what their items are made of. Out: batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from flatout.frameworks.pytorch.input.budget import LEAST_FREE_BYTES, may_take_bytes
from flatout.machine.control_groups import free_memory_bytes

LOOK_EVERY_BYTES = 2**26
"""How often it is seen while the store grows whether memory is still free."""

MOST_CHANGES = 4
"""How often what items are made of may change before nothing is kept any more."""

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Room:
    """Memory for all stores of a process.

    Args:
        most_bytes: How much they may take together; None: for each what the machine's free memory allows.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._stores: weakref.WeakSet[ItemCache] = weakref.WeakSet()

    def free_bytes(self, store: ItemCache) -> int:
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


class ItemCache:
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
        self._mark: Any = None
        self._num_changes = 0
        self._look_at_bytes = LOOK_EVERY_BYTES
        self._columns: list[Column] = []
        self._form: Any = None
        self._place_after = np.zeros(0, np.int32)
        """For each item one more than its place, 0 where it has none: pages that are never used take no memory."""

    def places(self, indices: Sequence[int], mark: Any) -> Places | None:
        """Where the items lie; None where one is not there, or they are not made of the same any more."""
        if mark != self._mark:
            self.forget(mark)
        if not self._columns or min(indices) < 0 or max(indices) >= self.num_items:
            return None
        places: Places = self._place_after.take(np.asarray(indices)).astype(np.int64) - 1
        return None if places.min() < 0 else places

    def take(self, places: Places) -> Any:
        """The batch of these places, in memory and in containers of its own."""
        numbers = torch.from_numpy(places)
        return tree_unflatten([column.rows.index_select(0, numbers) for column in self._columns], self._form)

    def told(self, batch: Any, tell: Callable[[torch.Tensor, Column], None]) -> None:
        """Tell of which column each tensor of a batch of kept rows consists."""
        for column, leaf in zip(self._columns, tree_leaves(batch), strict=False):
            tell(leaf, column)

    def put(self, indices: Sequence[int], mark: Any, batch: Any) -> None:
        """Keep what is not there yet."""
        if self._mark != mark or self.why_stopped or min(indices) < 0 or max(indices) >= self.num_items:
            return
        leaves, form = tree_flatten(batch)
        if not all(type(leaf) is torch.Tensor and leaf.is_contiguous() for leaf in leaves):
            return self._stop("its batches are not all dense tensors")
        if not self._columns:
            self._make_room(leaves, form)
        if self.why_stopped or form != self._form or not all(map(_fits, self._columns, leaves)):
            return
        numbers, which = np.unique(np.asarray(indices), return_index=True)
        which = which[self._place_after[numbers] == 0]
        if not len(which):
            return
        places = slice(self.num_kept, self.num_kept + len(which))
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.rows[places] = leaf[torch.from_numpy(which)]
        self._place_after[np.asarray(indices)[which]] = np.arange(places.start + 1, places.stop + 1)
        self.num_kept = places.stop
        if self.num_kept * (self.taken_bytes // self.num_items) >= self._look_at_bytes:
            self._look_at_bytes += LOOK_EVERY_BYTES
            free_bytes = free_memory_bytes()
            if free_bytes is not None and free_bytes < LEAST_FREE_BYTES:
                self._stop("memory ran short")

    def forget(self, mark: Any = None) -> None:
        """What items are made of has changed."""
        self._num_changes += self._mark is not None
        self._mark, self.num_kept, self.taken_bytes, self._columns = mark, 0, 0, []
        if self._num_changes > MOST_CHANGES:
            self._stop("what its items are made of changes all the time")

    def _stop(self, why: str) -> None:
        self.why_stopped, self.num_kept, self.taken_bytes, self._columns = why, 0, 0, []

    def _make_room(self, leaves: list[torch.Tensor], form: Any) -> None:
        needed = self.num_items * max(1, sum(leaf.nbytes for leaf in leaves) // len(leaves[0]))
        if needed > self._room.free_bytes(self):
            return self._stop("no memory for all items")
        self.taken_bytes, self._form, self._look_at_bytes = needed, form, LOOK_EVERY_BYTES
        self._columns = [Column(leaf, self.num_items) for leaf in leaves]
        self._place_after = np.zeros(self.num_items, np.int32)


def _fits(column: Column, leaf: torch.Tensor) -> bool:
    return leaf.dtype is column.rows.dtype and leaf.shape[1:] == column.rows.shape[1:]
