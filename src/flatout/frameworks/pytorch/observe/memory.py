"""What was the highest memory use, and how much memory does each step take anew?

In: a reset, or the end of a step. Out: bytes of the device where there is one, else of the process; page faults. On
Linux the kernel's high-water mark is reset through `clear_refs`; where that is refused the present size stands in for
the peak.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from flatout.frameworks.pytorch.observe import devices
from flatout.records.facts import DeviceMemory


def reset_peak(device: str | torch.device) -> bool:
    """Forget the peak so far; whether that could be done. In a run of the user's own it is the script's."""
    if devices.has_queue(device := torch.device(device)):
        devices.reset_peak(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes(device: str | torch.device) -> int | None:
    """The peak since the last reset, or since the process began; None where nothing tells."""
    if devices.has_queue(device := torch.device(device)):
        return devices.peak_bytes(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), None)


def held_bytes() -> int:
    """What the process holds: the most that PyTorch's allocator gave out on the GPU, else what is resident now."""
    if (device := devices.in_use()) is not None:
        return devices.peak_bytes(device)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def memory_of_device() -> DeviceMemory | None:
    """What PyTorch's allocator counted on the present GPU; None where none is used, or another allocator counts."""
    if (device := devices.in_use()) is None:
        return None
    try:
        counted = devices.memory_counts(device)
        return DeviceMemory(
            allocated_bytes=int(counted["allocated_bytes.all.peak"]),
            reserved_bytes=int(counted["reserved_bytes.all.peak"]),
            num_retries=int(counted.get("num_alloc_retries", 0)),
        )
    except (RuntimeError, KeyError):
        return None


class PageFaults:
    """First touches of memory that the process did not have, as the kernel counts them, at the ends of some steps."""

    def __init__(self) -> None:
        self._counts: list[int] = []

    def note(self, *, first: bool) -> None:
        """A step has ended; `first` where what came before it does not count."""
        self._counts = [*(() if first else self._counts[-2:]), resource.getrusage(resource.RUSAGE_SELF).ru_minflt]

    @property
    def per_step(self) -> int | None:
        """Of the last two steps the fewer, because a step may also make what stays; None before there are two."""
        if len(self._counts) < 3:
            return None
        before, middle, after = self._counts
        return min(middle - before, after - middle)
