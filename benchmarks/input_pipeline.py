"""How many samples a second does a loader give, as PyTorch fetches them and under `--levers input`?

    python benchmarks/input_pipeline.py [mnist] [tokens] [photographs] ... [--rounds 7]

The loader alone, one intra-op thread. In each round every side makes its dataset and loader anew and goes over it
twice, over images five times, the sides in turn, so that there is a first and a later epoch of each. The batches of
both sides are compared bit by bit before anything is timed. Photographs are copied, each with a comment of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.items.shadow import difference
from flatout.frameworks.pytorch.levers import registry
from flatout.judge import stats
from flatout.machine.read import read_machine
from flatout.run.choice import parse_levers
from input_workloads import AHEAD, IMAGES, SMALL, copied, jpegs, left_alone, tensors
from measuring import ROOT, SHARED, quiet, ratio, write

sys.path.insert(0, str(ROOT / "scripts"))
from engaged import Engaged

NUM_COPIES = 5
"""How often each photograph lies in the folder."""

NUM_PASSES = 2
NUM_PASSES_OF_IMAGES = 5
STEP_S = 0.060
NUM_STEPS = 80
Levers = Mapping[str, Mapping[str, Any]]
Make = Callable[[int], DataLoader[Any]]


def named(*words: str) -> Levers:
    """Levers as they are typed behind `--levers`."""
    return parse_levers(words, registry(), read_machine)


@contextmanager
def engaged(levers: Levers | None) -> Iterator[None]:
    """Loaders that are iterated inside run under these levers; None is PyTorch without us."""
    if levers is None:
        yield
        return
    under = Engaged(levers)
    try:
        yield
    finally:
        under.loaders.remove()


def pass_s(loader: DataLoader[Any]) -> float:
    """Seconds of a whole pass, each batch dropped as soon as it is there."""
    begun_s = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begun_s


def agree(make: Make, num_workers: int, levers: Levers) -> None:
    """Compare two whole passes bit by bit, and the random stream after each."""
    found = []
    for side in (None, levers):
        torch.manual_seed(0)
        np.random.seed(0)
        with engaged(side):
            loader = make(num_workers)
            found.append([(list(loader), torch.get_rng_state()) for _ in range(NUM_PASSES)])
    for (batches, state), (plain, plain_state) in zip(found[1], found[0], strict=True):
        if (why := difference(batches, plain)) is not None or not torch.equal(state, plain_state):
            raise SystemExit(f"the batches differ: {why or 'the random stream'}")


class Sides:
    """What is timed in turn: for each side a number of workers and levers; and other work, each once a round."""

    def __init__(self, make: Make, sides: Mapping[str, tuple[int, Levers | None]]) -> None:
        self.make = make
        self.sides = sides
        self.alone: dict[str, Callable[[], float]] = {}
        self.num_passes = NUM_PASSES

    def measured(self, rounds: int) -> dict[str, list[list[float]]]:
        """Seconds: for each side a list for each pass, of as many as there are rounds."""
        names = [*self.sides, *self.alone]
        found: dict[str, list[list[float]]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                found[name].append([self.alone[name]()] if name in self.alone else self._one(name))
        return {name: [list(times) for times in zip(*rows, strict=True)] for name, rows in found.items()}

    def _one(self, name: str) -> list[float]:
        num_workers, levers = self.sides[name]
        with engaged(levers):
            loader = self.make(num_workers)
            return [pass_s(loader) for _ in range(self.num_passes)]


def account(
    found: Mapping[str, list[list[float]]], num: int, pairs: Mapping[str, tuple[str, int, str]]
) -> dict[str, Any]:
    """The samples, samples a second, and ratios of the first side's first pass to a pass of the other side."""
    medians = {name: [num / stats.summarize(times).median for times in passes] for name, passes in found.items()}
    result: dict[str, Any] = {"samples_a_pass": num, "passes_s": found, "samples_per_s": medians}
    for name, (baseline, which, candidate) in pairs.items():
        of_baseline = found[baseline][min(which, len(found[baseline]) - 1)]
        result[name] = ratio(of_baseline, found[candidate][min(which, len(found[candidate]) - 1)])
        print(f"  {name}: {result[name]['ratio']}", flush=True)
    return result


def gathering_s(loader: DataLoader[Any]) -> Callable[[], float]:
    """Seconds of as many `index_select`s on items that lie ready in one tensor."""
    ready = torch.stack([loader.dataset[index][0] for index in range(len(loader.dataset))])

    def once() -> float:
        order = torch.randperm(len(ready)).split(loader.batch_size)
        begun_s = time.perf_counter()
        for indices in order:
            ready.index_select(0, indices)
        return time.perf_counter() - begun_s

    return once


def working_step() -> Callable[[], None]:
    """As many matrix products as one thread does in `STEP_S` now, whatever else goes on later."""
    a = torch.randn(256, 256)

    def work(num: int) -> None:
        for _ in range(num):
            torch.mm(a, a)

    work(50)
    begun_s = time.perf_counter()
    work(200)
    num = round(200 * STEP_S / (time.perf_counter() - begun_s))
    return lambda: work(num)


def measure_small(name: str, rounds: int) -> None:
    """Small items: all of `input`, and `fused_fetch` alone, against PyTorch."""
    make, num_workers = SMALL[name].make, SMALL[name].num_workers
    agree(make, num_workers, named("input"))
    quiet()
    alone = named("virtual_workers" if num_workers else "fused_fetch")
    sides = Sides(
        make, {"plain": (num_workers, None), "alone": (num_workers, alone), "input": (num_workers, named("input"))}
    )
    if not num_workers:
        sides.alone["index_select"] = gathering_s(make(0))
    print(name, flush=True)
    found = sides.measured(rounds)
    pairs = {
        "alone_first": ("plain", 0, "alone"), "alone_second": ("plain", 1, "alone"),
        "input_first": ("plain", 0, "input"), "input_second": ("plain", 1, "input"),
    }  # fmt: skip
    if not num_workers:
        pairs |= {
            "of_index_select_first": ("index_select", 0, "input"),
            "of_index_select": ("index_select", 1, "input"),
        }
    result = {"workers_of_the_script": num_workers, "alone": list(alone), "input": list(named("input"))}
    write(f"input_{name}", result | account(found, len(make(0).dataset), pairs))


def measure_images(name: str, rounds: int, folder: Path) -> None:
    """`decoded_store` against PyTorch, without workers and with two."""

    def make(num_workers: int) -> DataLoader[Any]:
        return IMAGES[name](num_workers, folder)

    kept = named("decoded_store")
    agree(make, 0, kept)
    quiet()
    sides = Sides(
        make, {"plain": (0, None), "two_workers": (2, None), "kept": (0, kept), "two_workers_kept": (2, kept)}
    )
    sides.num_passes = NUM_PASSES_OF_IMAGES
    print(name, flush=True)
    pairs = {
        "first": ("plain", 0, "kept"), "first_with_two_workers": ("two_workers", 0, "two_workers_kept"),
        "last": ("plain", -1, "kept"), "last_with_two_workers": ("two_workers", -1, "two_workers_kept"),
    }  # fmt: skip
    write(f"input_{name}", account(sides.measured(rounds), len(make(0).dataset), pairs))


def measure_ahead(name: str, rounds: int, folder: Path) -> None:
    """`ahead` against PyTorch without workers and with two: alone, and beside a step that is as long as a fetch."""

    def make(num_workers: int) -> DataLoader[Any]:
        return AHEAD[name](num_workers, folder)

    num, levers = 2, named("ahead=2")
    agree(make, 0, levers)
    quiet()
    sides = Sides(make, {"plain": (0, None), "two_workers": (2, None), "ahead": (0, levers)})
    sides.num_passes = 1
    print(name, flush=True)
    pairs = {"over_plain": ("plain", 0, "ahead"), "over_two_workers": ("two_workers", 0, "ahead")}
    result = {"processes": num, **account(sides.measured(rounds), len(make(0).dataset), pairs)}
    step, took = working_step(), dict[str, list[list[float]]]()
    for number in range(rounds):
        order = ["plain", "ahead", "free_data", "two_workers"]
        for side in order if number % 2 == 0 else order[::-1]:
            with engaged(levers if side == "ahead" else None):
                loader: Any = make(2 if side == "two_workers" else 0)
                batches = [next(iter(loader))] * len(loader) if side == "free_data" else loader
                begun_s = time.perf_counter()
                for _ in batches:
                    step()
                took.setdefault(side, [[]])[0].append(time.perf_counter() - begun_s)
    pairs = {f"beside_a_step_{side}": ("plain", 0, side) for side in ("ahead", "two_workers", "free_data")}
    beside = account(took, len(make(0).dataset), pairs)
    write(f"input_{name}", {**result, "step_s": STEP_S, "beside": beside})


def measure_cost(rounds: int) -> None:
    """What a script pays that computes for `STEP_S` in each step: left alone by all levers, and computed at once."""
    for name, make in (("left_alone", left_alone), ("tensors", tensors)):
        quiet()
        step, sides = working_step(), {"plain": None, "input": named("input")}
        found: dict[str, list[list[float]]] = {side: [] for side in sides}
        fetches: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                with engaged(sides[side]):
                    begun_s = time.perf_counter()
                    fetches[side] += fetches_s(make(0), step, NUM_STEPS)
                    found[side].append([time.perf_counter() - begun_s])
        each = {side: stats.summarize(times).median for side, times in fetches.items()}
        share = (each["input"] - each["plain"]) / STEP_S
        print(f"cost, {name}: {1e6 * (each['input'] - each['plain']):.1f} us a step, {100 * share:.3f} %", flush=True)
        result = {"step_s": STEP_S, "fetch_s": each, "share_of_a_step": share}
        passes = {side: [list(times) for times in zip(*rows, strict=True)] for side, rows in found.items()}
        write(f"input_cost_{name}", result | account(passes, NUM_STEPS, {"end_to_end": ("plain", 0, "input")}))


def fetches_s(loader: DataLoader[Any], step: Callable[[], None], num: int) -> list[float]:
    """Seconds of each of so many fetches beside a step."""
    found, batches = [], iter(loader)
    for _ in range(num):
        begun_s = time.perf_counter()
        next(batches)
        found.append(time.perf_counter() - begun_s)
        step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=[*SMALL, *IMAGES, *AHEAD, "cost"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--photographs", type=Path, default=SHARED / "imagenet-sample", help="a folder of JPEGs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="flatout-benchmark-") as folder:
        for path in jpegs(arguments.photographs):
            for number in range(NUM_COPIES):
                copied(path, number, Path(folder))
        for name in arguments.cases:
            if name == "cost":
                measure_cost(arguments.rounds)
            elif name in AHEAD:
                measure_ahead(name, arguments.rounds, Path(folder))
            elif name in IMAGES:
                measure_images(name, arguments.rounds, Path(folder))
            else:
                measure_small(name, arguments.rounds)


if __name__ == "__main__":
    main()
