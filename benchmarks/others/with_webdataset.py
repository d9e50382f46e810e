"""WebDataset: samples in tar shards, shuffled in a buffer, batched in the workers; a setting is a number of workers.

Source: https://github.com/webdataset/webdataset, "Getting started"
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from contract import BATCH, STRIDE, WINDOW, Source, main
from PIL import Image
from script import digit_transform, photograph_transform

NUM_SHARDS = 8
BUFFER = 1000


def digits(source: Source) -> Iterator[dict[str, Any]]:
    for image, label in zip(*source.arrays, strict=True):
        yield {"x.npy": image, "y.cls": int(label)}


def jpegs(source: Source) -> Iterator[dict[str, Any]]:
    for index, path in enumerate(source.files):
        yield {"x.jpg": Path(path).read_bytes(), "y.cls": index}


def windows(source: Source) -> Iterator[dict[str, Any]]:
    for index in range((len(source.arrays[0]) - WINDOW - 1) // STRIDE):
        yield {"x.npy": source.arrays[0][index * STRIDE : index * STRIDE + WINDOW + 1]}


def numbers(source: Source) -> Iterator[dict[str, Any]]:
    for x, y in zip(*source.arrays, strict=True):
        yield {"x.npy": x, "y.cls": int(y)}


def written(items: Any, source: Source) -> None:
    """Put all samples into shards."""
    samples = list(items(source))
    each = -(-len(samples) // NUM_SHARDS)
    with webdataset.ShardWriter(str(source.made / "%06d.tar"), maxcount=each, verbose=0) as shards:
        for number, sample in enumerate(samples):
            shards.write({"__key__": f"{number:08d}", **sample})


def loader(workload: str, dataset: Any, setting: str) -> Any:
    return webdataset.WebLoader(dataset.batched(BATCH[workload]), batch_size=None, num_workers=int(setting))


def samples(source: Source) -> Any:
    shards = sorted(str(path) for path in source.made.glob("*.tar"))
    return webdataset.WebDataset(shards, shardshuffle=NUM_SHARDS).shuffle(BUFFER)


def same(value: Any) -> Any:
    return value


def digit(transform: Any, image: np.ndarray) -> Any:
    return transform(Image.fromarray(image))


def window(sample: Any) -> Any:
    found = torch.from_numpy(sample[0].astype(np.int64))
    return found[:-1], found[1:]


def mnist(source: Source, setting: str) -> Any:
    dataset = samples(source).decode().to_tuple("x.npy", "y.cls").map_tuple(partial(digit, digit_transform()), same)
    return loader("mnist", dataset, setting)


def photographs(source: Source, setting: str) -> Any:
    transform = photograph_transform(source.still)
    dataset = samples(source).decode("pil").to_tuple("x.jpg", "y.cls").map_tuple(transform, same)
    return loader("photographs", dataset, setting)


def tokens(source: Source, setting: str) -> Any:
    return loader("tokens", samples(source).decode().to_tuple("x.npy").map(window), setting)


def tensors(source: Source, setting: str) -> Any:
    dataset = samples(source).decode().to_tuple("x.npy", "y.cls").map_tuple(torch.from_numpy, same)
    return loader("tensors", dataset, setting)


if __name__ == "__main__":
    main(
        "webdataset",
        {"mnist": mnist, "photographs": photographs, "tokens": tokens, "tensors": tensors},
        {name: partial(written, items) for name, items in
         {"mnist": digits, "photographs": jpegs, "tokens": windows, "tensors": numbers}.items()},
    )  # fmt: skip
