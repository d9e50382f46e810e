"""Which NVIDIA GPUs would a framework see? As CUDA's own driver says it, and no framework is asked.

In: `libcuda`, which reads `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`, and knows the slices of a GPU
(MIG). Out: `Accelerator`s in its order. The driver is asked in a process of its own (this file by its path, which
needs nothing of flatout): who has initialised CUDA may not be forked any more.

It takes as long as CUDA takes to start, which a script pays as well. There is no limit to it: a machine whose GPU is
there or not by how quick its driver was would be another machine from one moment to the next.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.records.ceilings import Accelerator

LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")

NODES = ("dev/nvidiactl", "dev/dxg", "dev/nvhost-ctrl-gpu")
"""What there is beside a driver: on a machine, under WSL, on a Jetson. Without any no process is started."""

CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""`CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`. Source: CUDA Driver API, `cuda.h`."""


def read_accelerators(root: Path = Path("/")) -> tuple[Accelerator, ...]:
    """The GPUs that this process may use; empty where there is no driver, or it has none to give."""
    from flatout.records.ceilings import Accelerator

    if not any((root / node).exists() for node in NODES):
        return ()
    command = [sys.executable, "-I", "-S", __file__]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        return tuple(Accelerator(**found) for found in json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return ()


def devices(driver: Any) -> list[dict[str, Any]]:
    """Name, memory and compute capability of each device that a loaded driver shows."""
    found: list[dict[str, Any]] = []
    num, device, total_bytes = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(num)):
        return []
    for number in range(num.value):
        name, capability = ctypes.create_string_buffer(256), [ctypes.c_int(), ctypes.c_int()]
        failed = (
            driver.cuDeviceGet(ctypes.byref(device), number)
            or driver.cuDeviceGetName(name, len(name), device)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(total_bytes), device)
            or driver.cuDeviceGetAttribute(ctypes.byref(capability[0]), CAPABILITY_MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(capability[1]), CAPABILITY_MINOR, device)
        )
        if not failed:
            found.append(
                {
                    "name": name.value.decode(errors="replace"),
                    "memory_bytes": total_bytes.value,
                    "compute_capability": f"{capability[0].value}.{capability[1].value}",
                }
            )
    return found


def main() -> None:
    """Print what the first driver that can be loaded shows, as JSON."""
    for library in LIBRARIES:
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        print(json.dumps(devices(driver)))
        return
    print("[]")


if __name__ == "__main__":
    main()
