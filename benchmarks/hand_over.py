"""How long does a script wait for a batch that a worker has ready, by PyTorch's way and by ours?

    python benchmarks/hand_over.py

One worker, batches of 1 to 4 equal tensors, the script busy for 5 ms a batch (so that the worker is ahead).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flatout.frameworks.pytorch.input.hand_over import context_for
from flatout.judge import stats
from measuring import quiet, ratio, write

BUSY_S = 0.005
NUM_BATCHES = 100
ROUNDS = 6


class Ready(Dataset):
    """Batches that cost nothing to make."""

    def __init__(self, num_tensors: int, num_bytes: int) -> None:
        self.tensors = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(num_tensors)]

    def __len__(self) -> int:
        return 2 * NUM_BATCHES

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [tensor + 1 for tensor in self.tensors]


def wait_s(num_tensors: int, num_bytes: int, context: Any) -> float:
    """Mean seconds of one fetch."""
    loader = DataLoader(Ready(num_tensors, num_bytes), batch_size=None, num_workers=1, multiprocessing_context=context)
    batches = iter(loader)
    next(batches)
    waited_s = 0.0
    for _ in range(NUM_BATCHES):
        until_s = time.perf_counter() + BUSY_S
        while time.perf_counter() < until_s:
            pass
        begun_s = time.perf_counter()
        next(batches)
        waited_s += time.perf_counter() - begun_s
    return waited_s / NUM_BATCHES


def main() -> None:
    torch.set_num_threads(1)
    quiet()
    rows = []
    for num_tensors in (1, 2, 4):
        for kib in (1, 64, 256, 512, 1024):
            found: dict[str, list[float]] = {"shared": [], "by value": []}
            for number in range(ROUNDS):
                for side in list(found) if number % 2 == 0 else list(found)[::-1]:
                    ours = context_for({"num_workers": 1, "prefetch_factor": 2}) if side == "by value" else None
                    found[side].append(wait_s(num_tensors, kib * 1024, ours))
            compared = ratio(found["shared"], found["by value"])
            rows.append({"num_tensors": num_tensors, "tensor_kib": kib, "samples_s": found, "ratio": compared})
            medians = {side: f"{stats.summarize(values).median * 1e3:.2f} ms" for side, values in found.items()}
            print(num_tensors, "x", kib, "KiB", medians, f"{compared['ratio']:.2f}", flush=True)
    write("hand_over", {"unit": "s a fetch", "rows": rows})


if __name__ == "__main__":
    main()
