"""A training script with one bottleneck planted: `planted_script.py KIND SHARE [--amount AMOUNT] [--measure]`.

SHARE is the part of each step that the planted cause shall take. KIND may be two (`decode+logging`), each of which then
takes as long as either would alone: so they are as large as each other, and larger than the rest from a half on.
With `--calibrate` the script finds how much of it that needs on this machine and prints it; `--amount` plants so much.
With `--measure` it trains with and without the cause by turns and prints the step times of both as JSON, which is what
removing the cause really brings.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH = 8
PIECES = {
    "decode": (24.0, 1.0),
    "checkpoints": (2e5, 1.0),
    "garbage collection": (5e3, 1.0),
    "logging": (50.0, 1.0),
    "paging": (16.0, 1.0),
}
"""How much of a cause to begin with where it is not counted in seconds, and the least."""
PAGES_BYTES = 2**26
FETCHING = ("storage", "decode", "transform", "collate")
SPENT = "spent_ms"
"""How a line on the error stream begins that says what each of two causes took, in the order of their names."""


def spin(seconds: float) -> None:
    """Pure Python for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(50))


class Cause:
    """What is planted: a unit of work, made so many times a step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.amount = 0.0
        self.on = True
        self.spent_s = 0.0
        self._prepare()

    def _prepare(self) -> None:
        kind = self.kind
        if kind == "storage":
            self._serve()
        elif kind == "decode":
            noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(noise).save(file, "JPEG")
            self.encoded = file.getvalue()
        elif kind == "garbage collection":
            gc.disable()
            self.heap: list[list[None]] = []  # long rows: to walk small objects takes as long as they lie scattered
            self.is_frozen = False
        elif kind == "checkpoints":
            self.weights, self.checkpoint = torch.zeros(0), io.BytesIO()
        elif kind == "paging":  # in a file that was there before: what a trial writes may lie in memory
            self.file = os.open("pages", os.O_RDONLY)
            self.pages = mmap.mmap(self.file, PAGES_BYTES, prot=mmap.PROT_READ)

    def _serve(self) -> None:
        """Another process that answers after a while, as a slow disk or a far server does."""
        reading, self.asking = os.pipe()
        self.answers, writing = os.pipe()
        if os.fork() == 0:
            os.close(self.asking)  # so that it ends when nobody can ask any more
            os.close(self.answers)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                while request := os.read(reading, 8):
                    time.sleep(int.from_bytes(request, "little") / 1e6)
                    os.write(writing, b"x" * 8)
            finally:
                os._exit(0)
        os.close(reading)
        os.close(writing)

    def unit(self, amount: float) -> None:
        """So much of it, in seconds where time is planted, else in pieces."""
        if self.on and amount > 0:
            begun = time.perf_counter()
            self._made[self.kind](amount)
            self.spent_s += time.perf_counter() - begun

    def adjust(self, wanted_s: float, took_s: float, least: float) -> None:
        """More or less of it; one noisy window must not lead to nothing, or to too much."""
        self.amount = max(self.amount * min(max(wanted_s / took_s, 0.25), 4.0), least)

    @property
    def _made(self) -> dict[str, Callable[[float], object]]:
        return {
            "storage": self._ask,
            "decode": self._decode,
            "transform": spin,
            "collate": spin,
            "own code": spin,
            "slow steps": lambda amount: random.random() < 0.1 and spin(10 * amount),
            "checkpoints": self._save,
            "garbage collection": self._collect,
            "logging": self._print,
            "paging": lambda amount: self._read_anew(round(amount)),
        }

    def _ask(self, seconds: float) -> None:
        os.write(self.asking, max(int(seconds * 1e6), 1).to_bytes(8, "little"))
        os.read(self.answers, 8)

    def _decode(self, num: float) -> None:
        for _ in range(round(num)):
            Image.open(io.BytesIO(self.encoded)).convert("RGB")

    def _save(self, num: float) -> None:
        if len(self.weights) != int(num):
            self.weights = torch.zeros(int(num))
        self.checkpoint.seek(0)  # into memory that is there: what new pages cost depends on the process' past
        torch.save({"weights": self.weights}, self.checkpoint)

    def _collect(self, num: float) -> None:
        if not self.is_frozen:  # what is there already takes longer than all that shall be planted
            gc.collect()
            gc.freeze()
            self.is_frozen = True
        del self.heap[round(num) :]
        while len(self.heap) < num:
            self.heap.append([None] * 200)
        gc.collect()

    def _print(self, num: float) -> None:
        print("\n".join(f"step loss={i * 0.1:.6f} {[i] * 5}" for i in range(round(num))), flush=True)

    def _read_anew(self, num: int) -> None:
        """Touch pages that are no longer in memory."""
        size = min(num, PAGES_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pages.madvise(mmap.MADV_DONTNEED, 0, size)
        os.posix_fadvise(self.file, 0, size, os.POSIX_FADV_DONTNEED)
        self.pages.madvise(mmap.MADV_RANDOM)
        for place in range(0, size, mmap.PAGESIZE):
            self.pages[place]


class Items(Dataset):
    def __init__(self, causes: list[Cause], length: int) -> None:
        self.causes = causes
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        for cause in self.causes:
            if cause.kind in ("storage", "transform"):
                cause.unit(cause.amount / BATCH)
            elif cause.kind == "decode":  # whole pictures only: some items have one more than others
                share, extra = divmod(round(cause.amount), BATCH)
                cause.unit(share + (index % BATCH < extra))
        return torch.full((64,), index / self.length), index % 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("share", type=float)
    parser.add_argument("--amount", help="of each cause, with commas between")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.kind in STANDALONE:
        STANDALONE[arguments.kind](arguments.share)
        return
    torch.set_num_threads(1)  # two that wait for each other make a step of any length where others compute
    causes = [Cause(kind) for kind in arguments.kind.split("+")]
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), *(nn.Linear(1024, 1024) for _ in range(4)), nn.Linear(1024, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def collate(items: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        for cause in causes:
            if cause.kind == "collate":
                cause.unit(cause.amount)
        return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])

    loader = DataLoader(Items(causes, 8 * 40_960), batch_size=BATCH, collate_fn=collate)
    training = Training(model, optimizer, loader, causes)
    if arguments.calibrate:
        wanted_s = training.plain_s() * arguments.share / (1 - arguments.share)
        if len(causes) == 1:
            print(training.calibrated(causes[0], wanted_s))
        else:
            print(",".join(map(str, training.alike(wanted_s))))
        return
    for cause, amount in zip(causes, arguments.amount.split(","), strict=True):
        cause.amount = float(amount)
    if arguments.measure:
        training.measured(causes, 2)  # warm up
        print(json.dumps(training.measured(causes, 12)))
        return
    while True:
        for num, batch in enumerate(loader, 1):
            training.step(batch)
            if len(causes) > 1 and num % 50 == 0:
                tell(causes)


def tell(causes: list[Cause]) -> None:
    """How long each really took since the last time, milliseconds: are they of equal size?"""
    print(SPENT, *(f"{1e3 * cause.spent_s:.1f}" for cause in causes), file=sys.stderr, flush=True)
    for cause in causes:
        cause.spent_s = 0.0


@dataclass
class Training:
    """A small model, and what holds it back."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    causes: list[Cause]

    def step(self, batch: list[torch.Tensor]) -> None:
        """One step, with the causes that are neither in items nor in their batch."""
        x, y = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        for cause in self.causes:
            if cause.kind not in FETCHING:
                cause.unit(cause.amount)

    def plain_s(self) -> float:
        """A step without any cause, after the first ones."""
        for cause in self.causes:
            cause.on = False
        return float(np.median(self.measured([], 5)["with"][2:]))  # with its data, unlike the other side

    def calibrated(self, cause: Cause, wanted_s: float) -> float:
        """How much of one cause takes so many seconds a step, by turns with none at all."""
        if cause.kind in ("transform", "collate", "own code", "slow steps"):
            return wanted_s
        cause.amount, least = PIECES.get(cause.kind, (1e-3, 1e-4))
        for other in self.causes:
            other.on = False
        for _ in range(6):  # the cost of a piece depends on how many there are
            found = {side: float(np.median(step_s)) for side, step_s in self.measured([cause], 3).items()}
            extra_s = max(found["with"] - found["without"], 1e-6)
            cause.adjust(wanted_s, extra_s, least)
        return cause.amount

    def alike(self, wanted_s: float) -> list[float]:
        """How much of each cause takes so many seconds a step where all of them are there."""
        for cause in self.causes:
            cause.amount, cause.on = PIECES.get(cause.kind, (wanted_s, 1e-4))[0], True
        batches = iter(self.loader)
        for _ in range(8):
            for cause in self.causes:
                cause.spent_s = 0.0
            begun, num = time.perf_counter(), 0
            while num < 20 or time.perf_counter() - begun < 0.5:
                self.step(next(batches))
                num += 1
            for cause in self.causes:
                least = PIECES.get(cause.kind, (0.0, 1e-4))[1]
                cause.adjust(wanted_s, max(cause.spent_s / num, 1e-6), least)
        return [cause.amount for cause in self.causes]

    def measured(self, causes: list[Cause], num_pairs: int) -> dict[str, list[float]]:
        """Step times of windows with some causes and without them, in an order drawn by lot."""
        found: dict[str, list[float]] = {"with": [], "without": []}
        lots, batches = random.Random(0), iter(self.loader)
        kept = next(batches)
        free_data = all(cause.kind in FETCHING for cause in causes)  # its remedy is data that cost nothing at all
        for _ in range(num_pairs):
            for on in (True, False) if lots.random() < 0.5 else (False, True):
                for cause in causes:
                    cause.on = on
                begun, num = time.perf_counter(), 0
                while num < 20 or time.perf_counter() - begun < 0.3:
                    self.step(kept if free_data and not on else next(batches))
                    num += 1
                found["with" if on else "without"].append((time.perf_counter() - begun) / num)
        return found


# -- causes that are the whole script ------------------------------------------------------------------------------


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


class Rows(Dataset):
    def __init__(self, width: int, length: int = 4096) -> None:
        self.width, self.length = width, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((self.width,), index / self.length), index % 2


def launch_overhead(share: float) -> None:
    num = {0.5: 60, 0.65: 120}.get(share, 300)
    layers = [layer for _ in range(num) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 2))
    train(model, DataLoader(Rows(32), batch_size=8), torch.optim.SGD(model.parameters(), lr=1e-3))


def compute(share: float) -> None:
    width = {0.5: 512, 0.65: 1024}.get(share, 2048)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    train(model, DataLoader(Rows(64), batch_size=128), torch.optim.SGD(model.parameters(), lr=1e-3))


def memory_bandwidth(share: float) -> None:
    num = {0.5: 2, 0.65: 4}.get(share, 8)

    class Elementwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 2)
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("field", torch.randn(4_000_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.field * self.scale
            for _ in range(num):
                y = torch.relu(y + 1.0)
            return self.first(x) + y.mean()

    model = Elementwise()
    train(model, DataLoader(Rows(64), batch_size=8), torch.optim.SGD(model.parameters(), lr=1e-3))


def optimizer_bound(share: float) -> None:
    width = {0.5: 600, 0.65: 1200}.get(share, 2400)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    train(model, DataLoader(Rows(64), batch_size=2), torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False))


def threads(share: float) -> None:
    torch.set_num_threads({0.5: 6, 0.65: 12}.get(share, 24))
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 2))
    train(model, DataLoader(Rows(256), batch_size=256), torch.optim.SGD(model.parameters(), lr=1e-3))


def worker_start_up(share: float) -> None:
    length = {0.5: 30, 0.65: 15}.get(share, 5)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), *(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 2))
    loader = DataLoader(Rows(64, 8 * length), batch_size=8, num_workers=2)
    train(model, loader, torch.optim.SGD(model.parameters(), lr=1e-3))


def synchronising(share: float, *, per_layer: bool) -> None:
    """The host waits for the device, once a step or after every layer; only a GPU runs ahead of it."""
    width = {0.5: 512, 0.65: 256}.get(share, 128)  # what is left to wait for when the host comes to the next launch
    layers = [layer for _ in range(20) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(width, 2)).to("cuda")
    if per_layer:
        for layer in layers:
            layer.register_forward_hook(lambda _module, _inputs, output: float(output.sum()) and None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(1024, width, device="cuda"), torch.zeros(1024, dtype=torch.long, device="cuda")
    while True:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if not per_layer:
            loss.item()


STANDALONE = {
    "sync per step": lambda share: synchronising(share, per_layer=False),
    "sync per layer": lambda share: synchronising(share, per_layer=True),
    "launch overhead": launch_overhead,
    "compute": compute,
    "memory bandwidth": memory_bandwidth,
    "optimizer": optimizer_bound,
    "thread oversubscription": threads,
    "worker start-up": worker_start_up,
}


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    main()
