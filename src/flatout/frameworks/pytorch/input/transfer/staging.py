"""How does a tensor get to a device without anybody waiting for what the device computes?

It is first copied into page-locked memory, so that the script may do with its own what it likes. A stream
beside the computing one takes it from there. Whoever asked for the tensor gets it with its own stream waiting for that
copy; where plain's host waits, ours waits as well, but for this copy alone. In: tensors on the CPU, rows of a store.
Out: tensors of the device.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from flatout.frameworks.pytorch.input.transfer.device import Device
from flatout.frameworks.pytorch.input.transfer.rows import Mirror, Rows

AHEAD_SHARE = 1 / 32
"""How much of the device's memory may wait there for the computing stream to get to it."""


class Copy:
    """A tensor of a device that is being written."""

    def __init__(self, device: Device, tensor: torch.Tensor, written: torch.cuda.Event) -> None:
        self.device = device
        self.tensor = tensor
        self.written = written


class Staging:
    """The way to one device.

    Args:
        device: Where to.
        most_bytes: How much of what it is copied from may be page-locked.
    """

    def __init__(self, device: Device, most_bytes: int) -> None:
        self.device = device
        self._most_ahead_bytes = min(int(device.total_bytes() * AHEAD_SHARE), most_bytes)
        self._ahead: deque[tuple[torch.cuda.Event, int]] = deque()
        """What was handed over that the computing stream has not got to, as far as that was looked at."""
        self._ahead_bytes = 0

    def begin(self, source: torch.Tensor, *, early: bool = False, rows: Rows | None = None) -> Copy | None:
        """Begin to copy a tensor; None where there is no room.

        Args:
            source: On the CPU.
            early: Nobody has asked for it yet, so nothing is waited for.
            rows: Of which kept rows it consists: the device is to keep them as well.
        """
        if not self._room_for(source.nbytes, waits=not early):
            return None
        device = self.device
        staged = source if device.is_pinned(source) else device.pinned(source)  # a loader's, nobody writes to
        with device.beside():
            tensor = device.empty(source.size(), source.stride(), source.dtype)
            device.copy(tensor, staged)
            if rows is not None and rows.column.mirror is not None:
                # before the script can change them, rows that have just arrived are put where they stay
                device.scatter(rows.column.mirror.rows, self._numbers(rows.places), tensor)
                rows.column.mirror.has(rows.places)
            return Copy(device, tensor, device.record())

    def gather(self, like: torch.Tensor, mirror: Mirror, places: np.ndarray) -> Copy | None:
        """Begin to put a tensor together of rows that lie on the device; None where there is no room."""
        if not self._room_for(like.nbytes, waits=True):
            return None
        device = self.device
        with device.beside():
            tensor = device.empty(like.size(), like.stride(), like.dtype)
            device.gather(tensor, mirror.rows, self._numbers(places))
            return Copy(device, tensor, device.record())

    def _numbers(self, places: np.ndarray) -> torch.Tensor:
        """Numbers of rows on the device; inside `beside`."""
        numbers = self.device.empty((len(places),), (1,), torch.int64)
        self.device.copy(numbers, self.device.pinned(torch.from_numpy(places)))
        return numbers

    def hand_over(self, copy: Copy, *, waits: bool) -> torch.Tensor:
        """The tensor, for the current stream to use; `waits`: for all streams, as after a copy that the host awaits."""
        self.device.wait(copy.written)
        self.device.in_use(copy.tensor)
        if waits:
            copy.written.synchronize()
        num_bytes: int = copy.tensor.nbytes
        self._ahead.append((self.device.record(), num_bytes))
        self._ahead_bytes += num_bytes
        return copy.tensor

    def _room_for(self, num_bytes: int, *, waits: bool) -> bool:
        """Whether there may be so much more on the device; the host runs ahead of it no further than memory allows."""
        if num_bytes > self._most_ahead_bytes:
            return False
        while self._ahead and (
            self._ahead[0][0].query() or (waits and self._ahead_bytes + num_bytes > self._most_ahead_bytes)
        ):
            event, passed_bytes = self._ahead.popleft()
            event.synchronize()
            self._ahead_bytes -= passed_bytes
        return self._ahead_bytes + num_bytes <= self._most_ahead_bytes
