"""How many samples a second does a loader give, as PyTorch fetches them and as the input pipeline computes them?

    python benchmarks/input_pipeline.py [mnist] [tensors] [tokens] [photographs] [own_photographs] [--rounds 7]
        [--photographs FOLDER]

The loader alone, one intra-op thread, passes in turn; each pass is over a new loader, so that each is a first epoch.
The batches of both sides are compared bit by bit before anything is timed. Photographs are the JPEGs of a folder, five
times over; what two threads can decode of them at best is measured beside them.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from flatout import stats
from flatout.frameworks.pytorch.loaders import Loaders
from flatout.frameworks.pytorch.pipeline.shadow import difference
from measuring import ROOT, SHARED, quiet, ratio, write

sys.path.insert(0, str(ROOT / "examples"))
import lenet
import resnet_folder

NUM_MNIST = 60_000
NUM_TIMES = 5
"""How often the photographs are gone through in a pass."""


class Windows(Dataset):
    """Windows of a text of tokens, as small language models are trained on."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return 6_400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * 150
        x = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        y = torch.from_numpy(self.tokens[start + 1 : start + 1 + self.length].astype(np.int64))
        return x, y


def mnist(num_workers: int) -> DataLoader[Any]:
    """PIL image, ToTensor, Normalize, batch 64."""
    (images, labels), _ = lenet.load_mnist(Path(SHARED / "MNIST"))
    transform = lenet.Compose([lenet.ToTensor(), lenet.Normalize((0.1307,), (0.3081,))])
    dataset = Subset(lenet.ImageDataset(images, labels, transform), range(NUM_MNIST))
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=num_workers)


def tensors(num_workers: int) -> DataLoader[Any]:
    """Twenty numbers and a label, batch 64."""
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(32_000, 20, generator=generator), torch.arange(32_000) % 10)
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=num_workers)


def tokens(num_workers: int) -> DataLoader[Any]:
    """Windows of 256 tokens of tinyshakespeare, batch 32."""
    text = (SHARED / "text" / "tinyshakespeare.txt").read_bytes()
    data = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    return DataLoader(Windows(data, 256), batch_size=32, shuffle=True, num_workers=num_workers)


class Photographs(Dataset):
    """The JPEGs of a folder, with torchvision's transforms."""

    def __init__(self, folder: Path) -> None:
        from torchvision import transforms

        self.files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
        self.transform = transforms.Compose([
            transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize(resnet_folder.MEAN, resnet_folder.STD),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(self.files[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), index


def photographs(num_workers: int) -> DataLoader[Any]:
    """RandomResizedCrop, flip, ToTensor, Normalize of torchvision, batch 32."""
    dataset = ConcatDataset([Photographs(FOLDER)] * NUM_TIMES)
    return DataLoader(dataset, batch_size=32, shuffle=True, num_workers=num_workers)


def own_photographs(num_workers: int) -> DataLoader[Any]:
    """The same as a script writes it without torchvision."""
    dataset = ConcatDataset([resnet_folder.PhotoFolder(FOLDER, 224)] * NUM_TIMES)
    return DataLoader(dataset, batch_size=32, shuffle=True, num_workers=num_workers)


CASES: dict[str, tuple[Callable[[int], DataLoader[Any]], tuple[int, ...]]] = {
    "mnist": (mnist, (0, 2)),
    "tensors": (tensors, (0, 2)),
    "tokens": (tokens, (0, 2)),
}


@contextmanager
def pipeline(engaged: bool) -> Iterator[None]:
    """Loaders that are iterated inside are fetched by the input pipeline, or as PyTorch does."""
    loaders = Loaders()
    if engaged:
        loaders.install()
        loaders.change({"in_process": True})
        loaders.engage("fused", True)
        loaders.engage("ahead", True)
    try:
        yield
    finally:
        loaders.remove()


def one_pass_s(loader: DataLoader[Any]) -> float:
    """Seconds of a whole pass, each batch dropped as soon as it is there."""
    begun_s = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begun_s


def agree(make: Callable[[int], DataLoader[Any]], num_workers: int) -> None:
    """Compare a whole pass bit by bit."""
    found = []
    for engaged in (False, True):
        torch.manual_seed(0)
        with pipeline(engaged):
            found.append((list(make(num_workers)), torch.get_rng_state()))
    why = difference(found[1][0], found[0][0])
    if why is not None or not torch.equal(found[0][1], found[1][1]):
        raise SystemExit(f"the batches differ: {why or 'the random stream'}")


def gather_s(loader: DataLoader[Any]) -> float:
    """Seconds of as many `index_select`s on items that are ready in one tensor."""
    ready = torch.stack([loader.dataset[index][0] for index in range(len(loader.dataset))])
    order = torch.randperm(len(ready)).split(loader.batch_size)
    begun_s = time.perf_counter()
    for indices in order:
        ready.index_select(0, indices)
    return time.perf_counter() - begun_s


def measure(name: str, rounds: int) -> None:
    """Passes in turn; the samples, and their ratio."""
    make, workers = CASES[name]
    for num_workers in workers:
        agree(make, num_workers)
        quiet()
        found: dict[str, list[float]] = {"plain": [], "pipeline": []}
        for number in range(rounds):
            for side in list(found) if number % 2 == 0 else list(found)[::-1]:
                with pipeline(side == "pipeline"):
                    found[side].append(one_pass_s(make(num_workers)))
        num = len(make(0).dataset)
        result: dict[str, Any] = {"samples_a_pass": num, "workers_of_the_script": num_workers, "pass_s": found}
        result["samples_per_s"] = {side: num / stats.summarize(times).median for side, times in found.items()}
        result["ratio"] = ratio(found["plain"], found["pipeline"])
        if name == "mnist":
            result["index_select_s"] = [gather_s(make(0)) for _ in range(3)]
        print(name, num_workers, result["samples_per_s"], result["ratio"]["ratio"], flush=True)
        write(f"input_{name}_{num_workers}_workers", result)


def decoding_s(files: list[Path], num_threads: int) -> float:
    """Seconds in which threads decode files that lie in memory, each whole, and do nothing else."""
    contents = [path.read_bytes() for path in files]
    with ThreadPoolExecutor(num_threads) as pool:
        begun_s = time.perf_counter()
        list(pool.map(lambda content: Image.open(io.BytesIO(content)).load(), contents))
        return time.perf_counter() - begun_s


def measure_photographs(name: str, rounds: int) -> None:
    """The pipeline without workers against PyTorch with none and with two, and decoding alone, in turn."""
    make = PHOTOGRAPHS[name]
    agree(make, 0)
    quiet()
    found: dict[str, list[float]] = {"plain": [], "two_workers": [], "pipeline": [], "decoding_alone": []}
    files = sorted(path for path in FOLDER.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    for number in range(rounds):
        for side in list(found) if number % 2 == 0 else list(found)[::-1]:
            if side == "decoding_alone":
                found[side].append(decoding_s(files * NUM_TIMES, 2))
                continue
            with pipeline(side == "pipeline"):
                found[side].append(one_pass_s(make(2 if side == "two_workers" else 0)))
    num = len(make(0).dataset)
    result: dict[str, Any] = {"samples_a_pass": num, "pass_s": found}
    result["samples_per_s"] = {side: num / stats.summarize(times).median for side, times in found.items()}
    result["ratio"] = ratio(found["plain"], found["pipeline"])
    result["ratio_to_two_workers"] = ratio(found["two_workers"], found["pipeline"])
    result["share_of_decoding_alone"] = ratio(found["decoding_alone"], found["pipeline"])
    print(name, result["samples_per_s"], *(result[part]["ratio"] for part in list(result)[-3:]), flush=True)
    write(f"input_{name}", result)


PHOTOGRAPHS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "photographs": photographs,
    "own_photographs": own_photographs,
}
FOLDER = SHARED / "imagenet-sample"


def main() -> None:
    global FOLDER
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=[*CASES, *PHOTOGRAPHS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--photographs", type=Path, default=FOLDER, help="a folder of JPEGs")
    arguments = parser.parse_args()
    FOLDER = arguments.photographs
    torch.set_num_threads(1)
    for name in arguments.cases:
        (measure_photographs if name in PHOTOGRAPHS else measure)(name, arguments.rounds)


if __name__ == "__main__":
    main()
