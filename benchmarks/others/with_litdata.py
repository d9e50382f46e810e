"""LitData: items put into chunks by `optimize`, read by `StreamingDataset`; a setting is a number of workers.

Source: https://github.com/Lightning-AI/litData, "Speed up model training"
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import torch
from contract import BATCH, STRIDE, WINDOW, Source, main
from PIL import Image
from script import digit_transform, photograph_transform


def digit(source: Source, index: int) -> dict[str, Any]:
    return {"x": source.arrays[0][index], "y": int(source.arrays[1][index])}


def photograph(source: Source, index: int) -> dict[str, Any]:
    return {"x": Path(source.files[index]).read_bytes(), "y": index}


def window(source: Source, index: int) -> dict[str, Any]:
    return {"x": source.arrays[0][index * STRIDE : index * STRIDE + WINDOW + 1]}


def number(source: Source, index: int) -> dict[str, Any]:
    return {"x": torch.from_numpy(source.arrays[0][index]), "y": int(source.arrays[1][index])}


def written(item: Any, source: Source) -> None:
    """Put all items into chunks."""
    num = len(source.files or source.arrays[0])
    inputs = range((num - WINDOW - 1) // STRIDE if item is window else num)
    litdata.optimize(
        partial(item, source),
        list(inputs),
        str(source.made),
        chunk_bytes="64MB",
        num_workers=2,
        start_method="fork",
        verbose=False,
    )


def read_digit(transform: Any, item: dict[str, Any]) -> Any:
    return transform(Image.fromarray(np.asarray(item["x"]))), item["y"]


def read_photograph(transform: Any, item: dict[str, Any]) -> Any:
    return transform(Image.open(io.BytesIO(item["x"])).convert("RGB")), item["y"]


def read_window(item: dict[str, Any]) -> Any:
    tokens = torch.from_numpy(item["x"].astype(np.int64))
    return tokens[:-1], tokens[1:]


def read_number(item: dict[str, Any]) -> Any:
    return item["x"], item["y"]


def loader(workload: str, read: Any, source: Source, setting: str) -> Any:
    dataset = litdata.StreamingDataset(str(source.made), shuffle=True, drop_last=False, transform=read)
    return litdata.StreamingDataLoader(dataset, batch_size=BATCH[workload], num_workers=int(setting))


def mnist(source: Source, setting: str) -> Any:
    return loader("mnist", partial(read_digit, digit_transform()), source, setting)


def photographs(source: Source, setting: str) -> Any:
    return loader("photographs", partial(read_photograph, photograph_transform(source.still)), source, setting)


def tokens(source: Source, setting: str) -> Any:
    return loader("tokens", read_window, source, setting)


def tensors(source: Source, setting: str) -> Any:
    return loader("tensors", read_number, source, setting)


if __name__ == "__main__":
    main(
        "litdata",
        {"mnist": mnist, "photographs": photographs, "tokens": tokens, "tensors": tensors},
        {name: partial(written, item) for name, item in
         {"mnist": digit, "photographs": photograph, "tokens": window, "tensors": number}.items()},
    )  # fmt: skip
