"""torchvision's random transforms, for the images of many items at once, each with the numbers that were drawn for it.

In: `Rows` of images, and a number for each item. Out: `Rows`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.frameworks.pytorch.pipeline import images
from flatout.frameworks.pytorch.pipeline.draws import MOST_BELOW, UNIFORM
from flatout.frameworks.pytorch.pipeline.operations import is_touched
from flatout.frameworks.pytorch.pipeline.rows import Rows, Unvectorised


@dataclass(frozen=True, slots=True)
class RandomTransform:
    """One of torchvision's random transforms.

    Attributes:
        kinds: What it draws for one item, from the transform, and the height and width of the image.
        rows: What is called with the transform, the images, and the numbers.
    """

    kinds: Callable[[Any, int, int], tuple[int, ...]]
    rows: Callable[[Any, np.ndarray, list[np.ndarray]], np.ndarray]


def of_transform(transform: Any) -> RandomTransform | None:
    """A random transform of torchvision's, its code as torchvision has it, and nothing hooked to it."""
    kind = type(transform)
    known = RANDOM.get(kind.__name__)
    library = sys.modules.get("torchvision.transforms.transforms")
    if known is None or getattr(library, kind.__name__, None) is not kind or is_touched(transform):
        return None
    return known


def kinds_of(known: RandomTransform, transform: Any, value: Any) -> tuple[int, ...]:
    """What a transform draws for each of these images, or for a single one.

    Raises:
        Unvectorised: It is not known.
    """
    if type(value) is Rows:
        width, height = images.size(value)
    elif type(value).__module__ == "PIL.Image" and value.mode in ("L", "RGB"):
        width, height = value.size
    else:
        raise Unvectorised("a random transform of something else than a grey or an RGB image")
    return known.kinds(transform, height, width)


def code_of(transform: Any) -> tuple[Any, ...]:
    """What a random transform runs."""
    library = vars(sys.modules["torchvision.transforms.functional"])
    own = type(transform).__dict__
    return (*(own.get(name) for name in ("forward", "get_params")), *(library.get(name) for name in _USED))


_USED = ("pad", "crop", "hflip", "vflip", "get_dimensions")


def _crop_kinds(transform: Any, height: int, width: int) -> tuple[int, ...]:
    left, top, right, bottom = _padding(transform)
    high, wide = height + top + bottom, width + left + right
    wanted = transform.size
    if transform.pad_if_needed or transform.padding_mode != "constant" or transform.fill != 0:
        raise Unvectorised("`RandomCrop` with padding of another kind")
    if high < wanted[0] or wide < wanted[1] or max(high, wide) >= MOST_BELOW:
        raise Unvectorised("`RandomCrop` of images that are too small")
    if (high, wide) == tuple(wanted):
        return ()
    return high - wanted[0] + 1, wide - wanted[1] + 1


def _padding(transform: Any) -> tuple[int, int, int, int]:
    """Left, top, right, bottom."""
    padding = transform.padding
    if padding is None:
        return 0, 0, 0, 0
    parts = (padding,) if type(padding) is int else tuple(padding)
    if any(type(one) is not int or one < 0 for one in parts) or len(parts) not in (1, 2, 4):
        raise Unvectorised("`RandomCrop` with padding of another kind")
    left, top, right, bottom = {1: parts * 4, 2: parts * 2, 4: parts}[len(parts)]
    return left, top, right, bottom


def _cropped(transform: Any, pixels: np.ndarray, numbers: list[np.ndarray]) -> np.ndarray:
    left, top, _, _ = _padding(transform)
    high, wide = transform.size
    found = np.zeros((len(pixels), high, wide, *pixels.shape[3:]), np.uint8)
    places = zip(*(one.tolist() for one in numbers), strict=True) if numbers else [(0, 0)] * len(pixels)
    for image, out, (row, column) in zip(pixels, found, places, strict=True):
        part = image[max(row - top, 0) : max(row - top + high, 0), max(column - left, 0) : max(column - left + wide, 0)]
        down, across = max(top - row, 0), max(left - column, 0)
        out[down : down + part.shape[0], across : across + part.shape[1]] = part
    return found


def _flipped(axis: int) -> Callable[[Any, np.ndarray, list[np.ndarray]], np.ndarray]:
    def rows(transform: Any, pixels: np.ndarray, numbers: list[np.ndarray]) -> np.ndarray:
        if type(transform.p) not in (int, float):
            raise Unvectorised("a chance that is no number")
        found = pixels.copy()
        which = np.flatnonzero(numbers[0] < np.float32(transform.p))
        found[which] = np.flip(pixels[which], axis)
        return found

    return rows


RANDOM: dict[str, RandomTransform] = {
    "RandomCrop": RandomTransform(_crop_kinds, _cropped),
    "RandomHorizontalFlip": RandomTransform(lambda *_: (UNIFORM,), _flipped(2)),
    "RandomVerticalFlip": RandomTransform(lambda *_: (UNIFORM,), _flipped(1)),
}
"""By the name of the class in `torchvision.transforms.transforms`."""
