"""Is a tensor the very one that a loader gave, as it was? By identity, count of changes and place in memory.

In: tensors. Out: what is known of each, once. Tensors are not kept alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.transfer.rows import Rows
    from flatout.frameworks.pytorch.input.transfer.staging import Copy

MOST_MISSES = 3
"""Copies begun in vain, one after another, after which none is begun for that place of a batch."""


class Habit:
    """Which places of a loader's batches the script copies, and where to: found by watching it."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[torch.device, int]] = {}

    def arrived(self, place: int, device: torch.device, *, hit: bool) -> None:
        """The script copies the tensor at this place to a device; `hit`: a copy that was begun is there."""
        _, num = self._wanted.get(place, (device, 0))
        self._wanted[place] = device, 0 if hit else num

    def missed(self, place: int) -> None:
        """A copy was begun and nobody wanted it."""
        if place in self._wanted:
            device, num = self._wanted[place]
            self._wanted[place] = device, num + 1

    def device_of(self, place: int) -> torch.device | None:
        """Where the next tensor at this place is likely to be copied; None where it is not."""
        device, num = self._wanted.get(place, (None, 0))
        return device if num < MOST_MISSES else None


class Leaf:
    """What is known of one tensor of a batch."""

    def __init__(self, *, rows: Rows | None = None) -> None:
        self.rows = rows
        self.copy: Copy | None = None
        """A copy that was begun before anybody asked."""
        self._habit: Habit | None = None
        self._place = 0

    def belongs(self, habit: Habit, place: int) -> None:
        """It is at this place of a loader's batch."""
        self._habit, self._place = habit, place

    def arrived(self, device: torch.device, *, hit: bool) -> None:
        """The script copies it to a device; `hit`: the copy that was begun is what it wants."""
        if self._habit is not None:
            self._habit.arrived(self._place, device, hit=hit)

    def take_copy(self) -> Copy | None:
        """The copy that was begun, once."""
        copy, self.copy = self.copy, None
        return copy

    def gone(self) -> None:
        """It is no more what it was, or nobody has it any more."""
        if self.take_copy() is not None and self._habit is not None:
            self._habit.missed(self._place)


class Known:
    """The tensors of batches that were given lately."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int, int, Leaf]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def know(self, tensor: torch.Tensor, leaf: Leaf) -> None:
        """From now on this is known of a tensor, as long as it stays what it is."""
        key = id(tensor)

        def gone(ref: weakref.ref[torch.Tensor]) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is ref:
                del self._entries[key]
                entry[3].gone()

        self._entries[key] = weakref.ref(tensor, gone), tensor._version, tensor.data_ptr(), leaf

    def of(self, tensor: torch.Tensor) -> Leaf | None:
        """What is known, and stays so."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        return entry[3] if (tensor._version, tensor.data_ptr()) == entry[1:3] else None

    def take(self, tensor: torch.Tensor) -> Leaf | None:
        """What is known, for the last time; None where the tensor was changed, as far as PyTorch counts."""
        leaf = self.of(tensor)
        entry = self._entries.pop(id(tensor), None)
        if leaf is None and entry is not None:
            entry[3].gone()
        return leaf

    def forget(self) -> None:
        """Nothing is known any more."""
        self._entries.clear()
