"""NVIDIA DALI without a GPU: its own operators, run by its own threads; a setting is a number of threads.

Photographs as its ResNet example has them; what lies in memory by `external_source`, a batch at a time.
Source: https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/use_cases/pytorch/resnet50/pytorch-resnet50.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from contract import BATCH, MEAN, MIDDLE, MNIST_MEAN, MNIST_STD, SIZE, STD, STRIDE, WINDOW, Source, main
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy


class Shuffled:
    """Batches of rows in a new order at each pass."""

    def __init__(self, num: int, batch: int, fetch: Callable[[np.ndarray], Any]) -> None:
        self.num = num
        self.batch = batch
        self.fetch = fetch

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(self.num)
        for begin in range(0, self.num, self.batch):
            yield self.fetch(order[begin : begin + self.batch])


class Tuples:
    """What a script expects of a loader; DALI gives a list with a dictionary for each GPU."""

    def __init__(self, pipeline: Any, reader_name: str | None = None) -> None:
        self.batches = DALIGenericIterator(
            pipeline, ["x", "y"], reader_name=reader_name, last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
        )

    def __iter__(self) -> Iterator[Any]:
        for found in self.batches:
            yield found[0]["x"], found[0]["y"]


@pipeline_def
def digits(batches: Shuffled) -> Any:
    images, labels = fn.external_source(batches, num_outputs=2, batch=True, cycle="raise", layout=["HWC", ""])
    return fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="CHW", mean=[MNIST_MEAN * 255], std=[MNIST_STD * 255]
    ), labels


@pipeline_def
def given(batches: Shuffled) -> Any:
    return tuple(fn.external_source(batches, num_outputs=2, batch=True, cycle="raise"))


@pipeline_def
def jpegs(files: list[str], still: str) -> Any:
    encoded, labels = fn.readers.file(
        files=files, labels=list(range(len(files))), random_shuffle=True, initial_fill=len(files), name="jpegs"
    )
    if still:
        images, mirror = fixed(encoded, still), 0
    else:
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.random.coin_flip(probability=0.5)
    mean, std = [255 * value for value in MEAN], [255 * value for value in STD]
    images = fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std, mirror=mirror)
    return images, fn.squeeze(fn.cast(labels, dtype=types.INT64), axes=[0])


def fixed(encoded: Any, still: str) -> Any:
    """Not of the script: what is compared where nothing is random."""
    images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    shape = fn.cast(fn.peek_image_shape(encoded)[:2], dtype=types.INT32)
    if still == "decoded":
        return fn.slice(images, shape // 2 - MIDDLE // 2, [MIDDLE, MIDDLE], axes=[0, 1])
    images = fn.slice(images, shape // 8, shape * 3 // 4, axes=[0, 1])
    return fn.resize(images, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_LINEAR, antialias=True)


def mnist(source: Source, setting: str) -> Tuples:
    images, labels = source.arrays
    batches = Shuffled(len(images), BATCH["mnist"], lambda rows: (images[rows][..., None], labels[rows]))
    return Tuples(digits(batches, batch_size=BATCH["mnist"], num_threads=int(setting), device_id=None))


def photographs(source: Source, setting: str) -> Tuples:
    pipeline = jpegs(list(source.files), source.still, batch_size=BATCH["photographs"],
                     num_threads=int(setting), device_id=None)  # fmt: skip
    return Tuples(pipeline, "jpegs")


def tokens(source: Source, setting: str) -> Tuples:
    windows = np.lib.stride_tricks.sliding_window_view(source.arrays[0], WINDOW + 1)[::STRIDE]

    def fetch(rows: np.ndarray) -> Any:
        found = windows[rows].astype(np.int64)
        return np.ascontiguousarray(found[:, :-1]), np.ascontiguousarray(found[:, 1:])

    batches = Shuffled((len(source.arrays[0]) - WINDOW - 1) // STRIDE, BATCH["tokens"], fetch)
    return Tuples(given(batches, batch_size=BATCH["tokens"], num_threads=int(setting), device_id=None))


def tensors(source: Source, setting: str) -> Tuples:
    numbers, labels = source.arrays
    batches = Shuffled(len(numbers), BATCH["tensors"], lambda rows: (numbers[rows], labels[rows]))
    return Tuples(given(batches, batch_size=BATCH["tensors"], num_threads=int(setting), device_id=None))


if __name__ == "__main__":
    main("dali", {"mnist": mnist, "photographs": photographs, "tokens": tokens, "tensors": tensors})
