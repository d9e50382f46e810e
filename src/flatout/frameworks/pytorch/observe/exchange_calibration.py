"""How fast do ranks of this machine exchange, when they do nothing else?

In: a command line (this file by its path: it needs nothing of flatout), once for each rank. Out: JSON lines of rank 0
on stdout, as those of `calibration.py`: probes, then samples.

Rates are *bus bandwidths*: what each rank's link has to carry however the exchange is done, so that a sum over four
ranks and one over eight can be compared with what the link gives. Source: NVIDIA, nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed

BUCKET_BYTES = 25 << 20
"""What `DistributedDataParallel` sums at once."""

ACTIVATION_BYTES = 1 << 20
ROUNDS = 10
WINDOW_S = 0.03


def main(rank: int, world: int, meeting: str, limit_s: float) -> None:
    """Measure, as one of the ranks."""
    torch.set_num_threads(1)
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world and dist.is_nccl_available()
    backend = "nccl" if on_gpus else "gloo"
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    store = dist.FileStore(meeting, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit_s))
    probes = _probes(rank, world, device)
    for name, (unit, source, _, _) in probes.items():
        _say(rank, {"kind": "probe", "name": name, "unit": unit, "source": f"{source}, {backend}, {world} ranks"})
    calls = {name: _num_calls(exchange, device) for name, (_, _, exchange, _) in probes.items()}
    for _ in range(ROUNDS):
        for name, (unit, _, exchange, carried) in probes.items():
            took_s = _timed(exchange, calls[name], device) / calls[name]
            _say(rank, {"kind": "sample", "name": name, "value": took_s if unit == "s" else carried / took_s})
    dist.destroy_process_group()


def _probes(rank: int, world: int, device: torch.device) -> dict[str, tuple[str, str, Callable[[], Any], float]]:
    """For each name: the unit, what it is, the exchange, and the bytes that a rank's link carries in it."""
    bucket = torch.zeros(BUCKET_BYTES // 4, device=device)
    part = torch.zeros(BUCKET_BYTES // 4 // world, device=device)
    whole = torch.zeros(part.numel() * world, device=device)
    activation, number = torch.zeros(ACTIVATION_BYTES // 4, device=device), torch.zeros(1, device=device)

    def passed_on() -> None:
        """Rank 0 to rank 1 and back; the others look on."""
        if rank == 0:
            dist.send(activation, 1)
            dist.recv(activation, 1)
        elif rank == 1:
            dist.recv(activation, 0)
            dist.send(activation, 0)

    summed, gathered = 2 * (world - 1) / world * bucket.nbytes, (world - 1) / world * whole.nbytes
    mebibytes = f"{BUCKET_BYTES >> 20} MiB"
    return {
        "sum": ("B/s", f"sums of {mebibytes}", lambda: dist.all_reduce(bucket), summed),
        "gather": ("B/s", f"gathering of {mebibytes}", lambda: dist.all_gather_into_tensor(whole, part), gathered),
        "passing on": ("B/s", f"{ACTIVATION_BYTES >> 20} MiB to one rank and back", passed_on, 2 * activation.nbytes),
        "start of a sum": ("s", "a sum of one number", lambda: dist.all_reduce(number), 0.0),
    }


def _num_calls(exchange: Callable[[], Any], device: torch.device) -> int:
    """How many make up a window; the same on all ranks."""
    _timed(exchange, 2, device)
    took_s = torch.tensor([_timed(exchange, 3, device) / 3], device=device)
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return max(round(WINDOW_S / max(took_s.item(), 1e-6)), 1)


def _timed(exchange: Callable[[], Any], num: int, device: torch.device) -> float:
    """Seconds of so many, begun together."""
    dist.barrier()
    begun_s = time.perf_counter()
    for _ in range(num):
        exchange()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun_s


def _say(rank: int, line: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
