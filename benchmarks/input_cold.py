"""How long does a first epoch over photographs on slow storage take, plain and under `read_ahead`?

    python benchmarks/input_cold.py [--latency-ms 10 1] [--rounds 7] [--quick]

The storage is a throttled mount (`throttled_mount.py`): each lookup, each opening and each read takes the latency, and
all share one bandwidth. The loader alone, one intra-op thread. In each round every side gets a mount of its own, with
an empty cache, and goes over it once, the sides in turn. How long eight threads take to read the files and do nothing
else is measured beside them; and what `read_ahead` costs where all files are in memory. The batches of both sides are
compared bit by bit before anything is timed. Where nothing can be mounted it says why, and measures nothing.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from input_pipeline import Sides, account, agree, named
from input_workloads import jpegs, photographs
from measuring import SHARED, quiet, write
from throttled_mount import throttled, why_not

NUM_FILES = 400
QUICK_FILES = 120
MEGABYTES_PER_S = 100.0

READ_AHEAD = named("read_ahead")
SIDES = {
    "plain": (0, None),
    "two_workers": (2, None),
    "read_ahead": (0, READ_AHEAD),
    "two_workers_read_ahead": (2, READ_AHEAD),
}
PAIRS = {
    "read_ahead_alone": ("plain", 0, "read_ahead"),
    "read_ahead_with_two_workers": ("two_workers", 0, "two_workers_read_ahead"),
    "first_of_reading_alone": ("reading_alone", 0, "read_ahead"),
}


class Cold(Sides):
    """Each time on a mount of its own, whose files nobody has read."""

    def __init__(self, folder: Path, mount: Path, latency_ms: float) -> None:
        super().__init__(lambda num_workers: photographs(num_workers, mount), SIDES)
        self.num_passes = 1
        self.alone["reading_alone"] = self._reading
        self._mounted = (folder, mount, latency_ms, MEGABYTES_PER_S)

    def _one(self, name: str) -> list[float]:
        with throttled(*self._mounted):
            return super()._one(name)

    def _reading(self) -> float:
        with throttled(*self._mounted) as mount, ThreadPoolExecutor(8) as pool:
            begun_s = time.perf_counter()
            list(pool.map(Path.read_bytes, jpegs(mount)))
            return time.perf_counter() - begun_s


def copied(photographs_in: Path, num: int, folder: Path) -> None:
    """Lay so many photographs into a folder."""
    paths = jpegs(photographs_in)
    for number in range(num):
        shutil.copy(paths[number % len(paths)], folder / f"{number:05}.jpg")


def measure_cold(folder: Path, mount: Path, latency_ms: float, rounds: int) -> dict[str, Any]:
    """First epochs on storage with this latency."""
    print(f"a latency of {latency_ms:g} ms", flush=True)
    num = len(jpegs(folder))
    setup = {"latency_ms": latency_ms, "megabytes_per_s": MEGABYTES_PER_S}
    return setup | told(account(Cold(folder, mount, latency_ms).measured(rounds), num, PAIRS))


def measure_warm(make: Callable[[int], DataLoader[Any]], rounds: int) -> dict[str, Any]:
    """The same files in memory: what looking on costs."""
    print("files in memory", flush=True)
    sides = Sides(make, {"plain": (0, None), "read_ahead": (0, READ_AHEAD)})
    pairs = {"first": ("plain", 0, "read_ahead"), "second": ("plain", 1, "read_ahead")}
    return told(account(sides.measured(rounds), len(make(0).dataset), pairs))


def told(result: dict[str, Any]) -> dict[str, Any]:
    """The result, of which the medians are printed."""
    for name, passes in result["samples_per_s"].items():
        print(f"  {name}: {', '.join(f'{one:.1f}' for one in passes)} samples a second", flush=True)
    return result


def measure(latencies_ms: Sequence[float], rounds: int, num_files: int, photographs_in: Path, keep: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="flatout-benchmark-") as own:
        folder, mount = Path(own) / "files", Path(own) / "mount"
        folder.mkdir()
        mount.mkdir()
        copied(photographs_in, num_files, folder)
        with throttled(folder, mount, 1.0, MEGABYTES_PER_S):
            agree(lambda num_workers: photographs(num_workers, mount), 0, READ_AHEAD)
        for latency_ms in latencies_ms:
            if keep:
                quiet()
            result = measure_cold(folder, mount, latency_ms, rounds)
            if keep:
                write(f"input_cold_{latency_ms:g}ms", result)
        result = measure_warm(lambda num_workers: photographs(num_workers, folder), rounds)
        if keep:
            write("input_warm_read_ahead", result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency-ms", nargs="*", type=float, default=[10.0, 1.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few files, two rounds, and no result is kept")
    parser.add_argument("--photographs", type=Path, default=SHARED / "imagenet-sample", help="a folder of JPEGs")
    arguments = parser.parse_args()
    if (why := why_not()) is not None:
        print(f"skipped: {why}")
        return
    torch.set_num_threads(1)
    quick = arguments.quick
    num_files = QUICK_FILES if quick else NUM_FILES
    measure(arguments.latency_ms, 2 if quick else arguments.rounds, num_files, arguments.photographs, not quick)


if __name__ == "__main__":
    main()
