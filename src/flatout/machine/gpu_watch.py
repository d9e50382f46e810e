"""What does NVIDIA's driver say of its GPUs: energy, who computes there, what holds their clock back?

In: `libnvidia-ml`, which comes with the driver, by `ctypes`. Out: numbers and words; None where the driver does not
say, as for a slice of a GPU. Standard library only and nothing of flatout: it also runs inside the user's process.

Source: NVML API Reference Guide, NVIDIA (`nvml.h`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")

NODES = ("/dev/nvidiactl", "/dev/dxg")

MOST_PROCESSES = 256

SM_CLOCK = 1

NOT_FOUND = 6
"""No process has computed since then."""

HELD_BACK = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
"""Reasons for a lower clock; that it idles, or that somebody has set it, is none of these."""


class NvmlError(Exception):
    """The driver refuses, in its own words."""


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint), ("memory_bytes", ctypes.c_ulonglong), ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


class _Sample(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint), ("unix_us", ctypes.c_ulonglong), ("sm_percent", ctypes.c_uint),
        ("memory_percent", ctypes.c_uint), ("encoder_percent", ctypes.c_uint), ("decoder_percent", ctypes.c_uint),
    )  # fmt: skip


class Nvml:
    """The driver's library.

    Args:
        library: As it was loaded; looked for without it.

    Raises:
        NvmlError: It is not there, or refuses.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or _loaded()
        self._ask("nvmlInit_v2")

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            say = self._library.nvmlErrorString
            say.restype = ctypes.c_char_p
            raise NvmlError(code, say(code).decode(errors="replace"))

    def _number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int:
        value = kind()
        self._ask(name, *arguments, ctypes.byref(value))
        return int(value.value)

    def handles(self, visible: str | None) -> dict[str, Any]:
        """GPUs by the names that `CUDA_VISIBLE_DEVICES` gives them, numbers or UUIDs; all of them without it."""
        names = visible.split(",") if visible is not None else map(str, range(self._number("nvmlDeviceGetCount_v2")))
        found: dict[str, Any] = {}
        for name in map(str.strip, names):
            if name in ("", "-1"):
                break
            handle = ctypes.c_void_p()
            if name.isdigit():
                self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(handle))
            else:
                self._ask("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
            found[name] = handle
        return found

    def uuid(self, handle: Any) -> str:
        """For example `GPU-7f…`."""
        text = ctypes.create_string_buffer(96)
        self._ask("nvmlDeviceGetUUID", handle, text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace")

    def joules(self, handle: Any) -> float:
        """Energy since the driver was loaded."""
        return self._number("nvmlDeviceGetTotalEnergyConsumption", handle, kind=ctypes.c_ulonglong) / 1e3

    def clock_mhz(self, handle: Any) -> int:
        """Of its multiprocessors, now."""
        return self._number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(SM_CLOCK))

    def held_back(self, handle: Any) -> tuple[str, ...]:
        """What holds its clock back now."""
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=ctypes.c_ulonglong)
        return tuple(dict.fromkeys(word for bit, word in HELD_BACK.items() if reasons & bit))

    def processes(self, handle: Any) -> set[int]:
        """Who has memory on it to compute with."""
        found, num = (_Process * MOST_PROCESSES)(), ctypes.c_uint(MOST_PROCESSES)
        self._ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(num), found)
        return {one.pid for one in found[: num.value]}

    def used(self, handle: Any, since_unix_us: int) -> dict[int, float]:
        """By process the share of the time since then that it computed, 0 to 1; looked at some times a second."""
        found, num = (_Sample * MOST_PROCESSES)(), ctypes.c_uint(MOST_PROCESSES)
        try:
            self._ask(
                "nvmlDeviceGetProcessUtilization", handle, found, ctypes.byref(num), ctypes.c_ulonglong(since_unix_us)
            )
        except NvmlError as problem:
            if problem.args[0] == NOT_FOUND:
                return {}
            raise
        shares: dict[int, list[float]] = {}
        for one in found[: num.value]:
            shares.setdefault(one.pid, []).append(one.sm_percent / 100)
        return {pid: sum(seen) / len(seen) for pid, seen in shares.items()}


def _loaded() -> Any:
    for library in LIBRARIES:
        try:
            return ctypes.CDLL(library)
        except OSError:
            continue
    raise NvmlError(0, "NVIDIA's `libnvidia-ml.so.1` is not there, which comes with its driver")


class GpuWatch:
    """The GPUs that a process computes on, window by window.

    Args:
        nvml: The driver's library; looked for without it, where there is a GPU.
        pid: The process; this one without it.
        gpus: UUIDs of those that it computes on, where they are known. In a container the driver numbers processes
            otherwise, and one that is alone on these is this one.
    """

    def __init__(self, nvml: Nvml | None = None, pid: int | None = None, gpus: Sequence[str] = ()) -> None:
        self._pids = {os.getpid() if pid is None else pid}
        self._handles: list[Any] = []
        self._nvml = nvml
        try:
            if self._nvml is None and any(map(os.path.exists, NODES)):
                self._nvml = Nvml()
            if self._nvml is not None:
                every = self._nvml.handles(",".join(gpus) or None).values()
                computing = {id(one): self._nvml.processes(one) for one in every}
                self._handles = [one for one in every if self._pids & computing[id(one)]]
                if not self._handles and gpus:
                    self._handles, found = [*every], set[int]().union(*computing.values())
                    self._pids = found if len(found) == 1 else set()
        except (NvmlError, AttributeError, OSError):  # the driver is too old for one of these
            self._handles = []

    def since(self, unix_s: float) -> Mapping[str, Any]:
        """What a window that began then has to say of them, by the names of its record; empty where nothing is seen."""
        if self._nvml is None or not self._handles:
            return {}
        found: dict[str, Any] = {}
        try:
            found["gpu_clock_mhz"] = min(map(self._nvml.clock_mhz, self._handles))
            reasons = [word for one in self._handles for word in self._nvml.held_back(one)]
            found["gpu_held_back"] = tuple(dict.fromkeys(reasons))
            used = [self._nvml.used(one, int(unix_s * 1e6)) for one in self._handles]
        except (NvmlError, AttributeError):
            return found
        if not self._pids:
            return found
        shares = [sum(share for pid, share in one.items() if pid not in self._pids) for one in used]
        return {**found, "foreign_gpu_fraction": min(max(shares), 1.0)}
