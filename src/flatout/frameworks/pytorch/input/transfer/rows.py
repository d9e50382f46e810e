"""Kept items that lie on a device as well: for each tensor of the items a mirror of the store's rows.

A mirror is filled by what the script copies to the device anyway. A store never writes a row anew; it begins with new
columns. In: columns of a store, numbers of rows. Out: whether all of a batch's rows lie on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flatout.frameworks.pytorch.input.budget import may_take_bytes

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.items.item_cache import Column, Places
    from flatout.frameworks.pytorch.input.transfer.device import Device

NUM_BEFORE = 20
"""Batches after which the script's steps are believed to have taken the memory that they take."""


LEFT_SHARE = 0.25
"""Of a device's memory so much stays free at the least: an evaluation may need more than all steps before it."""


class Mirror:
    """The rows of one column on one device."""

    def __init__(self, device: Device, rows: torch.Tensor) -> None:
        self.device = device
        self.rows = rows
        self._num_retries = device.num_retries()
        self._there = np.zeros(len(rows), bool)

    def is_in_the_way(self) -> bool:
        """Whether memory has run short on the device since it was made."""
        return self.device.num_retries() > self._num_retries

    def has(self, places: Places) -> None:
        """These rows lie there now."""
        self._there[places] = True

    def covers(self, places: Places) -> bool:
        """Whether all of these rows lie there."""
        return bool(self._there[places].all())


class Rows:
    """Which rows of which column a tensor of a batch consists of."""

    def __init__(self, column: Column, places: Places) -> None:
        self.column = column
        self.places = places

    def look(self, device: Device) -> Mirror | None:
        """The mirror on this device; made where it is time for it and all rows fit: some would not make a batch.

        Given up for good where the script needs its memory.
        """
        column = self.column
        if column.mirror is None and column.num_arrived >= 0:
            column.num_arrived += 1
            if column.num_arrived > NUM_BEFORE:
                column.num_arrived = -1  # it is made, or never
                column.mirror = _made(column.rows, device)
        if column.mirror is not None and column.mirror.is_in_the_way():
            column.mirror = None
        mirror: Mirror | None = column.mirror
        return mirror if mirror is not None and mirror.device is device else None


def _made(rows: torch.Tensor, device: Device) -> Mirror | None:
    free_bytes = device.free_bytes()
    if rows.nbytes > min(may_take_bytes(free_bytes), free_bytes - LEFT_SHARE * device.total_bytes()):
        return None
    try:
        with device.beside():
            return Mirror(device, device.empty(rows.size(), rows.stride(), rows.dtype))
    except torch.OutOfMemoryError:
        return None
