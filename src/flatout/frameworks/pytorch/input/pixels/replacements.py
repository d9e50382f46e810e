"""What do PIL's and torchvision's functions do while pixel work is noted?

Each function here is given the original and makes what is called instead, which is given the work of the item as well.
In: calls with images that are not computed yet. Out: images and tensors that are not computed yet, either.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from flatout.frameworks.pytorch.input.pixels import geometry
from flatout.frameworks.pytorch.input.pixels.calls import FLOATS, Layout
from flatout.frameworks.pytorch.input.pixels.elements import CHANNELS, Arithmetic, Elements, number
from flatout.frameworks.pytorch.input.pixels.files import picture_of, watch
from flatout.frameworks.pytorch.input.pixels.images import deferred as deferred_image
from flatout.frameworks.pytorch.input.pixels.pictures import Called, Picture
from flatout.frameworks.pytorch.input.pixels.surroundings import file_of
from flatout.frameworks.pytorch.input.pixels.tensors import DeferredTensor
from flatout.frameworks.pytorch.input.pixels.tensors import deferred as deferred_tensor
from flatout.frameworks.pytorch.input.pixels.work import Work
from flatout.guest.plain_lines import caller_like

SAME_SIZE = (
    "adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue", "adjust_gamma", "adjust_sharpness",
    "affine", "perspective", "invert", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
"""torchvision's functions on images of PIL's by which size and mode stay."""

Replacement: TypeAlias = Callable[[Any], Callable[..., Any]]


class DeferredArray:
    """An array of an image that is not computed yet, on its way to `torch.from_numpy`."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture


def noting_open(original: Any) -> Callable[..., Any]:
    """`PIL.Image.open`: what it gives is decoded later."""

    def opened(work: Work | None, *operands: Any, **keywords: Any) -> Any:
        image = original(*operands, **keywords)
        if work is not None:
            file = file_of(operands[0] if operands else keywords.get("fp")) if work.files is not None else None
            if file is not None and work.files is not None:
                work.files.append(file)
            watch(image, work)
        return image

    return opened


def noting_to_tensor(original: Any) -> Callable[..., Any]:
    """Torchvision's `to_tensor`."""

    def to_tensor(work: Work | None, pic: Any) -> Any:
        picture, dtype = picture_of(pic), torch.get_default_dtype()
        if picture is None or picture.mode not in CHANNELS or dtype not in FLOATS:
            return original(pic)
        (width, height), num = picture.size, CHANNELS[picture.mode]
        by = Arithmetic("div", number(255, str(dtype).removeprefix("torch.")))
        strides = (height * width, width, 1) if num > 1 else (1, width, 1)
        if width == height == 1:  # which lies row by row as it is
            strides = (1, num, num)
        return deferred_tensor(Elements(picture, (2, 0, 1), (by,)), Layout((num, height, width), strides, dtype))

    return to_tensor


def noting_from_numpy(original: Any) -> Callable[..., Any]:
    """`torch.from_numpy` of an array that is not there yet."""

    def from_numpy(work: Work | None, *operands: Any) -> Any:
        if len(operands) != 1 or type(operands[0]) is not DeferredArray:
            if operands and isinstance(operands[0], np.ndarray) and not operands[0].flags.writeable:
                return caller_like(sys._getframe(2))(original, *operands)  # where PyTorch warns, it names the line
            return original(*operands)
        picture: Picture = operands[0].picture
        (width, height), num = picture.size, CHANNELS[picture.mode]
        if num == 1:
            return deferred_tensor(
                Elements(picture, (0, 1)), Layout((height, width), (width, 1), torch.uint8, array=True)
            )
        layout = Layout((height, width, num), (width * num, num, 1), torch.uint8, array=True)
        return deferred_tensor(Elements(picture, (0, 1, 2)), layout)

    return from_numpy


def noting_pil_to_tensor(original: Any) -> Callable[..., Any]:
    """Torchvision's `pil_to_tensor`."""

    def pil_to_tensor(work: Work | None, pic: Any) -> Any:
        picture = picture_of(pic)
        if picture is None or picture.mode not in CHANNELS:
            return original(pic)
        (width, height), num = picture.size, CHANNELS[picture.mode]
        layout = Layout((num, height, width), (1, num * width, num), torch.uint8, array=True, view=True)
        return deferred_tensor(Elements(picture, (2, 0, 1)), layout)

    return pil_to_tensor


def noting_normalize(original: Any) -> Callable[..., Any]:
    """Torchvision's `normalize`."""

    def normalize(work: Work | None, tensor: Any, mean: Any, std: Any, inplace: Any = False) -> Any:
        if isinstance(tensor, DeferredTensor) and vars(tensor)["flatout_work"].here():
            given = geometry.constants((mean, std))
            made = tensor.flatout_normalize(*given, in_place=bool(inplace)) if given is not None else None
            if made is not None:
                return made
        return original(tensor, mean, std, inplace)

    return normalize


def noting_same_size(original: Any) -> Callable[..., Any]:
    """A function on an image by which size and mode stay."""

    def changed(work: Work | None, img: Any, *operands: Any, **keywords: Any) -> Any:
        picture, given, named = picture_of(img), geometry.constants(operands), geometry.constants(keywords.values())
        if picture is None or picture.mode != "RGB" or given is None or named is None:
            return original(img, *operands, **keywords)
        call = functools.partial(original, **dict(zip(keywords, named, strict=True)))
        return deferred_image(Called(picture, picture.size, picture.mode, call, given, keeps_info=False))

    return changed


def noting_pad(original: Any) -> Callable[..., Any]:
    """Torchvision's `pad`."""

    def pad(work: Work | None, img: Any, padding: Any, fill: Any = 0, padding_mode: Any = "constant") -> Any:
        picture, given = picture_of(img), geometry.constants((padding, fill, padding_mode))
        size = None if picture is None else geometry.size_of_pad(picture.size, padding)
        if picture is None or size is None or given is None or padding_mode != "constant":
            return original(img, padding, fill, padding_mode)
        return deferred_image(Called(picture, size, picture.mode, original, given, keeps_info=False))

    return pad


def noting_to_grayscale(original: Any) -> Callable[..., Any]:
    """Torchvision's `to_grayscale`."""

    def to_grayscale(work: Work | None, img: Any, num_output_channels: Any) -> Any:
        picture, mode = picture_of(img), {1: "L", 3: "RGB"}.get(num_output_channels)
        if picture is None or mode is None or not geometry.converts(picture.mode, "L", picture.info):
            return original(img, num_output_channels)
        return deferred_image(Called(picture, picture.size, mode, original, (num_output_channels,), keeps_info=False))

    return to_grayscale
