"""What datasets do with images that come from arrays, for the images of many items at once.

An image in memory is its pixels; nothing is decoded or resampled here. In: `Rows` and operands. Out: `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable
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
    pixels = torch.from_numpy(np.ascontiguousarray(data))
    return pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def normalize(transform: Any, value: Any) -> Rows:
    """What torchvision's `Normalize` does."""
    if type(value) is not Rows or value.kind != "tensor" or value.data.dim() < 4 or transform.inplace:
        raise Unvectorised("`Normalize` of something else than an image, or in place")
    data = value.data
    mean = torch.as_tensor(transform.mean, dtype=data.dtype)
    std = torch.as_tensor(transform.std, dtype=data.dtype)
    if not data.is_floating_point() or mean.dim() != 1 or std.dim() != 1 or bool((std == 0).any()):
        raise Unvectorised("`Normalize` with other means than one a channel")
    return Rows("tensor", data.sub(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "ToTensor": to_tensor, "PILToTensor": pil_to_tensor, "Normalize": normalize,
}  # fmt: skip
"""torchvision's transforms, by the name of the class in `torchvision.transforms.transforms`."""
