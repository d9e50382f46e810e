"""How much may be kept while numbers are compared, and where? As much as a part of the memory that is free.

In: a device, tensors. Out: bytes; tensors that lie on the device where they fit, else on the host. What takes more than
that is not compared, which is said: `NoRoom`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from flatout.frameworks.pytorch.observe import devices
from flatout.machine.control_groups import free_memory_bytes, text_of

LEAST_BYTES = 200_000_000
"""May be kept wherever nothing tells how much is free, or less is."""

SHARE = 0.25
"""Of the memory that is free; the rest is for the replays' own results and for what they compute in between."""


_USED = re.compile(r"^Vm(HWM|RSS):\s+(\d+) kB", re.MULTILINE)
"""The most memory that the process has held since that was reset, and what it holds."""


Place = Callable[[torch.Tensor], torch.Tensor]


class NoRoom(Exception):
    """Neither the device nor the host has memory for what is to be kept."""


def room_bytes(device: str) -> int:
    """How much may be kept on a device, as `cuda:1`, or on the host, of what is free where a step needs most."""
    if device == "cpu":
        used = dict(_USED.findall(text_of(Path("/proc/self/status"))))
        free = (free_memory_bytes() or 0) - 1024 * (int(used.get("HWM", 0)) - int(used.get("RSS", 0)))
    else:
        free = devices.free_bytes(torch.device(device))
    return max(LEAST_BYTES, int(SHARE * free))


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Memory that tensors take, each as often as it is named."""
    return sum(t.numel() * t.element_size() for t in tensors)


def place_for(needed_bytes: int, device: str, what: str) -> Place:
    """What brings a tensor to where so many bytes have room: nothing, or a copy to the host.

    Raises:
        NoRoom: They have room nowhere.
    """
    if device == "cpu" or needed_bytes <= room_bytes(device):
        return lambda tensor: tensor
    if needed_bytes > room_bytes("cpu"):
        raise NoRoom(
            f"{what} take {needed_bytes / 1e9:.1f} GB, more than a quarter of the memory that is free on the device "
            f"({room_bytes(device) / 1e9:.1f} GB) or on the host ({room_bytes('cpu') / 1e9:.1f} GB)"
        )
    return lambda tensor: tensor.cpu()
