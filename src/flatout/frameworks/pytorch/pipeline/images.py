"""What datasets do with images that come from arrays, for the images of many items at once.

An image in memory is its pixels; nothing is decoded or resampled here. In: `Rows` and operands. Out: `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.pipeline.rows import Rows, Unvectorised


def of(value: Any) -> np.ndarray:
    """The pixels of grey or RGB images, `[items, height, width]` or `[items, height, width, 3]`."""
    if type(value) is not Rows or value.kind != "image":
        raise Unvectorised("an operand of another kind than when it was read")
    return value.data


def fromarray(value: Any, mode: str | None = None) -> Rows:
    """`PIL.Image.fromarray` of bytes."""
    if type(value) is Rows and value.kind == "array" and value.data.dtype == np.uint8:
        data = np.asarray(value.data)
        if data.ndim == 3 and mode in (None, "L"):
            return Rows("image", data)
        if data.ndim == 4 and data.shape[3] == 3 and mode in (None, "RGB"):
            return Rows("image", data)
    raise Unvectorised("an image of something else than bytes, grey or RGB")


def convert(value: Any, mode: str) -> Rows:
    """`image.convert` where it changes nothing, or repeats grey."""
    data = of(value)
    if (mode, data.ndim) in (("L", 3), ("RGB", 4)):
        return Rows("image", data)
    if (mode, data.ndim) == ("RGB", 3):
        return Rows("image", np.repeat(data[..., None], 3, axis=3))
    raise Unvectorised(f"a conversion to {mode}")


def size(value: Any) -> tuple[int, int]:
    """Width and height, the same for all."""
    data = of(value)
    return data.shape[2], data.shape[1]


def bands(value: Any) -> tuple[str, ...]:
    """The names of the channels, the same for all."""
    return ("L",) if of(value).ndim == 3 else ("R", "G", "B")


def to_tensor(transform: Any, value: Any) -> Rows:
    """What torchvision's `ToTensor` does: channels first, bytes to 0..1."""
    if type(value) is Rows and value.kind == "array":
        data = value.data
        if data.dtype != np.uint8 or data.ndim not in (3, 4):
            raise Unvectorised("`ToTensor` of something else than bytes")
    else:
        data = of(value)
    return Rows("tensor", _channels_first(data).to(torch.get_default_dtype()).div_(255))


def pil_to_tensor(transform: Any, value: Any) -> Rows:
    """What torchvision's `PILToTensor` does: channels first, as bytes."""
    return Rows("tensor", _channels_first(of(value)))


def _channels_first(data: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(data if data.flags.writeable else data.copy())
    return pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def normalize(transform: Any, value: Any, *, in_place: bool = False) -> Rows:
    """What torchvision's `Normalize` does; `in_place`: where the images lie."""
    if type(value) is not Rows or value.kind != "tensor" or value.data.dim() < 4 or transform.inplace:
        raise Unvectorised("`Normalize` of something else than an image, or in place")
    data, given = value.data, (transform.mean, transform.std)
    if not data.is_floating_point() or any(type(one) not in (tuple, list) for one in given):
        raise Unvectorised("`Normalize` of something else than floats, or by something else than a list")
    if any(len(one) not in (1, data.shape[1]) or not {*map(type, one)} <= {int, float} for one in given):
        raise Unvectorised("`Normalize` with other means than one a channel")
    mean, std = _by_channel(tuple(transform.mean), tuple(transform.std), data.dtype)
    return Rows("tensor", (data.sub_(mean) if in_place else data.sub(mean)).div_(std))


@lru_cache(maxsize=16)
def _by_channel(mean: tuple[Any, ...], std: tuple[Any, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One number a channel, as they stand beside images."""
    each = torch.as_tensor(mean, dtype=dtype), torch.as_tensor(std, dtype=dtype)
    if each[0].dim() != 1 or each[1].dim() != 1 or bool((each[1] == 0).any()):
        raise Unvectorised("`Normalize` with other means than one a channel")
    return each[0].view(-1, 1, 1), each[1].view(-1, 1, 1)


@dataclass(frozen=True, slots=True)
class Transform:
    """How one of torchvision's transforms is done for many images.

    Attributes:
        rows: What is called with the transform and the images.
        fresh: Whether the result is always in memory of its own.
        spending: The same in the memory of the images.
        attributes: What its result depends on beside the images.
    """

    rows: Callable[..., Rows]
    fresh: bool = False
    spending: Callable[..., Rows] | None = None
    attributes: tuple[str, ...] = ()


TRANSFORMS: dict[str, Transform] = {
    "ToTensor": Transform(to_tensor, fresh=True),
    "PILToTensor": Transform(pil_to_tensor),
    "Normalize": Transform(
        normalize, fresh=True, spending=partial(normalize, in_place=True), attributes=("mean", "std", "inplace")
    ),
}
"""torchvision's transforms, by the name of the class in `torchvision.transforms.transforms`."""
