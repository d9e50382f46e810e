"""G2: the machine's ceilings from a cold process, twice, against what an H100 can do by its data sheet."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from device import REHEARSAL
from log import Log

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


def run(log: Log) -> None:
    """All items."""
    first: dict[str, float] = {}
    log.item("machine", lambda: _machine(first))
    log.item("machine_again", lambda: _again(first))


def _measure() -> tuple[float, dict[str, Any], str]:
    begun_s = time.perf_counter()
    command = [sys.executable, "-m", "flatout", "machine", "--refresh", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=95)
    took_s = round(time.perf_counter() - begun_s, 1)
    return took_s, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr[-1500:]


def _values(found: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in found.get("values", ())}


def _machine(first: dict[str, float]) -> dict[str, Any]:
    took_s, found, said = _measure()
    values = _values(found)
    first.update(values)
    outside = {n: values.get(n) for n, (low, high) in BETWEEN.items() if not low <= values.get(n, 0.0) <= high}
    return {"wall_s": took_s, "values": values, "outside": outside, "stderr": said, "json": found,
            "ok": REHEARSAL or (not outside and took_s < 60)}  # fmt: skip


def _again(first: dict[str, float]) -> dict[str, Any]:
    took_s, found, said = _measure()
    ratios = {name: value / first[name] for name, value in _values(found).items() if first.get(name)}
    return {"wall_s": took_s, "ratios": ratios, "stderr": said,
            "ok": bool(ratios) and all(abs(r - 1) <= 0.03 for r in ratios.values())}  # fmt: skip
