"""The machine's ceilings from a cold process, twice, against what an H100 can do by its data sheet."""

from __future__ import annotations

import functools
import time
from typing import Any

from device import REHEARSAL, judged
from log import Item

from flatout import frameworks
from flatout.machine import calibrate

BETWEEN = {
    "matmul_bfloat16": (600e12, 990e12),
    "matmul_float16": (600e12, 990e12),
    "matmul_tf32": (300e12, 495e12),
    "matmul_float32": (40e12, 67e12),
    "memory_copy": (2.2e12, 4.8e12),
    "memory_in_place": (2.2e12, 4.8e12),
    "host_to_device": (15e9, 64e9),
    "device_to_host": (15e9, 64e9),
    "kernel_launch": (1.5e-6, 10e-6),
}
"""In FLOP/s, B/s and s; the upper ends are data sheets' (H100 SXM; memory: H200)."""


def items() -> list[Item]:
    """In this order."""
    return [
        Item("machine", "each lies where data sheets say, no remarks, within 60 s", _machine),
        Item("machine_again", "each is within 3 % of the first time", _again,
             cannot="measures what `machine` does once more, and a CPU beside other work is not within 3 %"),
    ]  # fmt: skip


def measured() -> dict[str, Any]:
    """By name, with seconds and remarks."""
    begun_s = time.perf_counter()
    found = calibrate.ceilings(frameworks.kind("pytorch").package, refresh=True, limit_s=12.0 if REHEARSAL else None)
    values = {one.name: one.value for one in found.values}
    return {"values": values, "remarks": found.remarks, "wall_s": round(time.perf_counter() - begun_s, 1)}


first = functools.cache(measured)


def _machine() -> dict[str, Any]:
    found = first()
    values = found["values"]
    outside = {n: values.get(n) for n, (low, high) in BETWEEN.items() if not low <= values.get(n, 0.0) <= high}
    return {**found, "outside": outside, "ok": judged(not outside and not found["remarks"] and found["wall_s"] < 60)}


def _again() -> dict[str, Any]:
    found, before = measured(), first()["values"]
    ratios = {name: value / before[name] for name, value in found["values"].items() if before.get(name)}
    return {**found, "ratios": ratios, "ok": bool(ratios) and all(abs(r - 1) <= 0.03 for r in ratios.values())}
