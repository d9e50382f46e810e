"""The driver's counters under load, exchanges of a world of one, and what looking costs a transformer."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import torch
from device import DEVICE, REHEARSAL, true_step_s, wait
from log import Item
from models import gpt
from windows import Windows

SIMULATED = "a driver of numbers"


def items() -> list[Item]:
    """In this order."""
    return [
        Item("joules", "energy over 5 s of products is power times time within 5 %", _joules, SIMULATED),
        Item(
            "watch", "this process, its clock and what holds it back are seen during 3 s of products", _watch, SIMULATED
        ),
        Item("world_of_one", "NCCL sums alone", _world_of_one, "CPU, by gloo"),
        Item("phases_cost", "noted: a transformer's step with phases over one without", partial(_phases_cost, 20)),
    ]


def _nvml() -> Any:
    from flatout.machine.gpu_watch import Nvml

    if not REHEARSAL:
        return Nvml()
    from simulated import tests

    with tests():
        from nvml_library import NvmlLibrary
    return Nvml(NvmlLibrary())


def _products(seconds: float) -> None:
    x, end_s = torch.randn(4096 if not REHEARSAL else 64, 4096, device=DEVICE), time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(20):
            x @ x.T
        wait()


def _joules() -> dict[str, Any]:
    import ctypes

    nvml, seconds = _nvml(), 0.1 if REHEARSAL else 5.0
    handle = next(iter(nvml.handles(None).values()))
    _products(seconds / 5)
    begun_s, before, powers = time.perf_counter(), nvml.joules(handle), []
    for _ in range(10):
        _products(seconds / 10)
        with contextlib.suppress(Exception):  # this check alone asks for it, and not each driver knows
            powers.append(nvml._number("nvmlDeviceGetPowerUsage", handle, kind=ctypes.c_uint) / 1e3)
    joules, took_s = nvml.joules(handle) - before, time.perf_counter() - begun_s
    expected = sum(powers) / len(powers) * took_s if powers else None
    right = None if not expected else abs(joules / expected - 1) <= 0.05
    return {"joules": joules, "power_times_time": expected, "powers_w": powers, "ok": right}


def _watch() -> dict[str, Any]:
    from flatout.machine.gpu_watch import GpuWatch

    _products(0.1)
    begun_s, nvml = time.time(), _nvml()
    watch = GpuWatch(nvml)
    _products(0.1 if REHEARSAL else 3.0)
    found = dict(watch.since(begun_s))
    pids = [sorted(nvml.processes(one)) for one in nvml.handles(None).values()]
    return {"found": found, "processes": pids, "ok": None if REHEARSAL else "gpu_clock_mhz" in found}


def _world_of_one() -> dict[str, Any]:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo" if REHEARSAL else "nccl", store=store, rank=0, world_size=1)
    try:
        x = torch.ones(1 << 20, device=DEVICE)
        seconds = true_step_s(lambda: dist.all_reduce(x), 20)
        return {"all_reduce_s": seconds, "ok": bool((x == 1).all())}
    finally:
        dist.destroy_process_group()


def _phases_cost(num: int) -> dict[str, Any]:
    step = gpt(width=768, context=256, batch=4, vocabulary=8000, depth=12).step
    watched, found = Windows(), {}
    try:
        watched.settle(step)
        for depth in ("off", "ends", "phases", "off"):
            watched.framework.coast() if depth == "off" else watched.framework.observe(depth)
            found.setdefault(depth, []).append(true_step_s(step, 3 if REHEARSAL else num))
    finally:
        watched.framework.detach()
    return {"step_s": found, "phases_over_off": found["phases"][0] / min(found["off"])}
