"""The device under test, and its stopwatch: CUDA, or a CPU in a rehearsal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

REHEARSAL = "GPU_CHECK_REHEARSES" in os.environ
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
SHRINK = 16 if REHEARSAL else 1
"""By what the sizes of a rehearsal are divided."""


def judged(fulfilled: bool) -> bool | None:
    """What only a device can fulfil: in a rehearsal it is not judged."""
    return None if REHEARSAL else fulfilled


def wait() -> None:
    """Until the device has done what it was given."""
    if not REHEARSAL:
        torch.cuda.synchronize()


def clock_s(compute: Callable[[], object]) -> float:
    """Seconds by the clock on the wall from an idle device until it is idle again."""
    wait()
    begun_s = time.perf_counter()
    compute()
    wait()
    return time.perf_counter() - begun_s


def true_step_s(step: Callable[[], object], num: int) -> float:
    """Seconds a step by the device's own events around many steps, after two to warm up."""
    for _ in range(2):
        step()
    wait()
    if REHEARSAL:
        return clock_s(lambda: [step() for _ in range(num)]) / num
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / num
