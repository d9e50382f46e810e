"""What does the training script have, whichever library loads its data? Its datasets and transforms.

In: what a workload reads. Out: datasets as PyTorch's `DataLoader` takes them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from contract import MEAN, MIDDLE, MNIST_MEAN, MNIST_STD, SIZE, STD, STRIDE, WINDOW, Source

from vision import torchvision

transforms = torchvision().transforms


class Digits(Dataset):
    """Images in memory, as torchvision's MNIST has them."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: Any) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


class Photographs(Dataset):
    """The JPEGs of a folder."""

    def __init__(self, files: tuple[str, ...], transform: Any) -> None:
        self.files = files
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(self.files[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), index


class Windows(Dataset):
    """Windows of a text of tokens, as small language models are trained on."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - WINDOW - 1) // STRIDE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * STRIDE
        x = torch.from_numpy(self.tokens[start : start + WINDOW].astype(np.int64))
        y = torch.from_numpy(self.tokens[start + 1 : start + 1 + WINDOW].astype(np.int64))
        return x, y


class Middle:
    """Not of the script: a square of the middle, to compare what was decoded."""

    def __call__(self, image: Any) -> Any:
        left, top = image.width // 2 - MIDDLE // 2, image.height // 2 - MIDDLE // 2
        return transforms.functional.crop(image, top, left, MIDDLE, MIDDLE)


class Box:
    """Not of the script: a fixed box, resized as `RandomResizedCrop` does it with a random one."""

    def __call__(self, image: Any) -> Any:
        width, height = image.size
        box = height // 8, width // 8, height * 3 // 4, width * 3 // 4
        return transforms.functional.resized_crop(image, *box, [SIZE, SIZE], antialias=True)


def digit_transform() -> Any:
    """ToTensor and Normalize."""
    return transforms.Compose([transforms.ToTensor(), transforms.Normalize((MNIST_MEAN,), (MNIST_STD,))])


def photograph_transform(still: str = "") -> Any:
    """RandomResizedCrop, flip, ToTensor, Normalize."""
    if still:
        before = [Middle() if still == "decoded" else Box()]
    else:
        before = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*before, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def digits(source: Source) -> Dataset[Any]:
    return Digits(*source.arrays, digit_transform())


def photographs(source: Source) -> Dataset[Any]:
    return Photographs(source.files, photograph_transform(source.still))


def windows(source: Source) -> Dataset[Any]:
    return Windows(source.arrays[0])


def numbers(source: Source) -> Dataset[Any]:
    return TensorDataset(*(torch.from_numpy(array) for array in source.arrays))


DATASETS = {"mnist": digits, "photographs": photographs, "tokens": windows, "tensors": numbers}
