"""Loaders as public scripts write them, for the benchmarks of the input pipeline.

In: how many workers the script asks for, and folders of data. Out: loaders, each over a new dataset.
"""

from __future__ import annotations

import atexit
import functools
import gzip
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from measuring import ROOT, SHARED
from vision import torchvision

sys.path.insert(0, str(ROOT / "examples"))
import lenet
import resnet_folder

VISION = torchvision()
MNIST = SHARED / "MNIST"
MEAN, STD = (0.1307,), (0.3081,)


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


class Photographs(Dataset):
    """The JPEGs of a folder, with torchvision's transforms."""

    def __init__(self, folder: Path) -> None:
        transforms = VISION.transforms
        self.files = jpegs(folder)
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


class Cropped(Photographs):
    """The same under Resize, RandomCrop and a flip: every item draws as many random numbers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        transforms = VISION.transforms
        self.transform = transforms.Compose([
            transforms.Resize(256), transforms.RandomCrop(224), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize(resnet_folder.MEAN, resnet_folder.STD),
        ])  # fmt: skip


class Waves(Dataset):
    """Sequences that NumPy computes in each item, as in public scripts about sensors and sound."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(1024, 2048)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        wave = np.convolve(self.x[index], np.hanning(33), mode="same") + 0.1 * np.random.standard_normal(2048)
        spectrum = np.abs(np.fft.rfft(wave))[:512]
        return torch.from_numpy(np.log1p(spectrum).astype(np.float32)), index % 5


def jpegs(folder: Path) -> list[Path]:
    """The photographs of a folder."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))


def copied(photograph: Path, number: int, folder: Path) -> None:
    """Lay a copy into a folder, with a comment, so that no two have the same bytes."""
    content = photograph.read_bytes()
    comment = b"\xff\xfe\x00\x03" + bytes([number])  # after the two bytes with which a JPEG begins
    (folder / f"{photograph.stem}_{number}{photograph.suffix}").write_bytes(content[:2] + comment + content[2:])


@functools.cache
def _unpacked() -> str:
    """A folder with MNIST's files where torchvision looks for them, until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="flatout-benchmark-")
    atexit.register(folder.cleanup)
    raw = Path(folder.name) / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in sorted(MNIST.rglob("*-ubyte.gz")):
        (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder.name


def mnist(num_workers: int) -> DataLoader[Any]:
    """torchvision's MNIST: PIL image, ToTensor, Normalize, batch 64, 60,000 items."""
    vision = VISION
    transform = vision.transforms.Compose([vision.transforms.ToTensor(), vision.transforms.Normalize(MEAN, STD)])
    dataset = vision.datasets.MNIST(_unpacked(), transform=transform)
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=num_workers)


def own_mnist(num_workers: int) -> DataLoader[Any]:
    """The same as the example `lenet.py` writes it."""
    (images, labels), _ = lenet.load_mnist(MNIST)
    transform = lenet.Compose([lenet.ToTensor(), lenet.Normalize(MEAN, STD)])
    dataset = lenet.ImageDataset(images, labels, transform)
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=num_workers)


def tensors(num_workers: int) -> DataLoader[Any]:
    """`TensorDataset`: twenty numbers and a label, batch 64."""
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(32_000, 20, generator=generator), torch.arange(32_000) % 10)
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=num_workers)


def tokens(num_workers: int) -> DataLoader[Any]:
    """Windows of 256 tokens of tinyshakespeare, batch 32."""
    text = (SHARED / "text" / "tinyshakespeare.txt").read_bytes()
    data = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    return DataLoader(Windows(data, 256), batch_size=32, shuffle=True, num_workers=num_workers)


class Counting(Dataset):
    """Counts its items, which no lever can take over."""

    def __init__(self) -> None:
        self.numbers = torch.randn(32_000, 20)
        self.calls = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.calls += 1
        return self.numbers[index]


def left_alone(num_workers: int) -> DataLoader[Any]:
    """A loader that all levers leave as it is, batch 64."""
    return DataLoader(Counting(), batch_size=64, shuffle=True, num_workers=num_workers)


def photographs(num_workers: int, folder: Path) -> DataLoader[Any]:
    """RandomResizedCrop, flip, ToTensor, Normalize of torchvision, batch 32."""
    return DataLoader(Photographs(folder), batch_size=32, shuffle=True, num_workers=num_workers)


def own_photographs(num_workers: int, folder: Path) -> DataLoader[Any]:
    """The same as the example `resnet_folder.py` writes it, without torchvision."""
    dataset = resnet_folder.PhotoFolder(folder, 224)
    return DataLoader(dataset, batch_size=32, shuffle=True, num_workers=num_workers)


def cropped(num_workers: int, folder: Path) -> DataLoader[Any]:
    """Resize, RandomCrop, flip, ToTensor, Normalize of torchvision, batch 32."""
    return DataLoader(Cropped(folder), batch_size=32, shuffle=True, num_workers=num_workers)


def waves(num_workers: int, folder: Path) -> DataLoader[Any]:
    """Noise and a spectrum by NumPy, batch 32; the folder is of no use to it."""
    return DataLoader(Waves(), batch_size=32, shuffle=True, num_workers=num_workers)


@dataclass(frozen=True)
class Small:
    """Small items: what the figure is, and the workers of the script that it is about."""

    make: Callable[[int], DataLoader[Any]]
    num_workers: int


SMALL = {
    "mnist": Small(mnist, 0),
    "own_mnist": Small(own_mnist, 0),
    "tensors": Small(tensors, 0),
    "tensors_two_workers": Small(tensors, 2),
    "tokens": Small(tokens, 0),
    "tokens_two_workers": Small(tokens, 2),
}
IMAGES: dict[str, Callable[[int, Path], DataLoader[Any]]] = {
    "photographs": photographs,
    "own_photographs": own_photographs,
}
AHEAD: dict[str, Callable[[int, Path], DataLoader[Any]]] = {"ahead_cropped": cropped, "ahead_waves": waves}
