"""What datasets do with images that come from arrays, for the images of many items at once.

An image in memory is its pixels; nothing is decoded or resampled here. In: `Rows` and operands. Out: `Rows`.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised


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
    return Rows("tensor", _channels_first(data).contiguous().to(torch.get_default_dtype()).div_(255))


def pil_to_tensor(transform: Any, value: Any) -> Rows:
    """What torchvision's `PILToTensor` does: channels first, as bytes, which lie as in the image."""
    return Rows("tensor", _channels_first(of(value)))


def _channels_first(data: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(data if data.flags.writeable else data.copy())
    return pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)


def to_image(transform: Any, value: Any) -> Rows:
    """What torchvision's `ToImage` does with an image: channels first, as bytes, which lie as in the image."""
    return Rows("image_tensor", _channels_first(of(value)))


def to_dtype(transform: Any, value: Any) -> Rows:
    """What torchvision's `ToDtype` does with bytes and floats; `scale`: from the range of one type to the other's."""
    if type(value) is not Rows or value.kind not in ("tensor", "image_tensor"):
        raise Unvectorised("`ToDtype` of something else than an image")
    data, dtype = value.data, transform.dtype
    floats = type(dtype) is torch.dtype and dtype.is_floating_point
    if not floats or type(transform.scale) is not bool or not (data.dtype is torch.uint8 or data.is_floating_point()):
        raise Unvectorised("`ToDtype` from or to other types than bytes and floats")
    return Rows(value.kind, _new("to_dtype_image")(data, dtype=dtype, scale=transform.scale))


def to_pure_tensor(transform: Any, value: Any) -> Rows:
    """What torchvision's `ToPureTensor` does with an image."""
    if type(value) is not Rows or value.kind not in ("tensor", "image_tensor"):
        raise Unvectorised("`ToPureTensor` of something else than an image")
    return Rows("tensor", value.data)


def _new(name: str) -> Any:
    """A function of version 2."""
    return vars(sys.modules["torchvision.transforms.v2.functional"])[name]


def normalize(transform: Any, value: Any, *, in_place: bool = False) -> Rows:
    """What torchvision's `Normalize` does; `in_place`: where the images lie."""
    tensors = ("tensor", "image_tensor")
    if type(value) is not Rows or value.kind not in tensors or value.data.dim() < 4 or transform.inplace:
        raise Unvectorised("`Normalize` of something else than an image, or in place")
    data, given = value.data, (transform.mean, transform.std)
    if not data.is_floating_point() or type(given[0]) not in (tuple, list) or type(given[1]) not in (tuple, list):
        raise Unvectorised("`Normalize` of something else than floats, or by something else than a list")
    mean, std = _by_channel(tuple(given[0]), tuple(given[1]), data.shape[1], data.dtype)
    return Rows(value.kind, (data.sub_(mean) if in_place else data.sub(mean)).div_(std))


@lru_cache(maxsize=16)
def _by_channel(
    mean: tuple[Any, ...], std: tuple[Any, ...], num_channels: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """One number a channel, as they stand beside images."""
    given = mean, std
    if any(len(one) not in (1, num_channels) or not {*map(type, one)} <= {int, float} for one in given):
        raise Unvectorised("`Normalize` with other means than one a channel")
    each = [torch.as_tensor(one, dtype=dtype, device="cpu") for one in given]
    if each[0].dim() != 1 or each[1].dim() != 1 or bool((each[1] == 0).any()):
        raise Unvectorised("`Normalize` with other means than one a channel")
    return each[0].view(-1, 1, 1), each[1].view(-1, 1, 1)
