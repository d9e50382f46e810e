"""Which page-locked buffer is free, and when may one be used again? Only after the event of its copy.

In: sizes. Out: buffers, as long as the budget has room.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flatout.frameworks.pytorch.input.transfer.device import Event

PAGE_BYTES = 4096

LARGEST_FIT = 2
"""A buffer holds what is at least half as large, or another would have to be made for small things all the time."""


class Buffer:
    """One page-locked buffer."""

    def __init__(self, bytes_: torch.Tensor) -> None:
        self.bytes = bytes_
        self.num_bytes = bytes_.numel()
        self._lent = True
        self._until: Event | None = None

    @property
    def free(self) -> bool:
        """Whether nobody fills it, and nothing copies from it any more."""
        return not self._lent and (self._until is None or self._until.query())

    def lend(self) -> None:
        """Somebody fills it from now on."""
        self._lent, self._until = True, None

    def until(self, event: Event) -> None:
        """It is being copied from; after this event it is free."""
        self._lent, self._until = False, event


class Buffers:
    """All page-locked buffers of one device.

    Args:
        make: Gives new page-locked memory.
        most_bytes: How much there may be.
    """

    def __init__(self, make: Callable[[int], torch.Tensor], most_bytes: int) -> None:
        self._make = make
        self._most_bytes = most_bytes
        self._all: list[Buffer] = []

    @property
    def num_bytes(self) -> int:
        """How much there is."""
        return sum(one.num_bytes for one in self._all)

    def take(self, num_bytes: int) -> Buffer | None:
        """A buffer that holds so many bytes, to be filled; None where all are in use and there is no room for more."""
        free = [one for one in self._all if one.free]
        fitting = [one for one in free if num_bytes <= one.num_bytes <= max(num_bytes * LARGEST_FIT, PAGE_BYTES)]
        if fitting:
            found = min(fitting, key=lambda one: one.num_bytes)
            found.lend()
            return found
        needed = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        while self.num_bytes + needed > self._most_bytes:
            if not free or needed > self._most_bytes:
                return None
            self._all.remove(free.pop())  # of another size: the script's batches have changed
        found = Buffer(self._make(needed))
        self._all.append(found)
        return found

    def lose(self, buffer: Buffer) -> None:
        """Nobody knows whether something still copies from it: it is not used again."""
        self._all.remove(buffer)
