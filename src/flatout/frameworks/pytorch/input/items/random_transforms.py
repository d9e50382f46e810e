"""torchvision's random transforms, for the images of many items at once, each with the numbers that were drawn for it.

In: `Rows` of images, and a number for each item. Out: `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.frameworks.pytorch.input.items import images, vision
from flatout.frameworks.pytorch.input.items.draws import MOST_BELOW, UNIFORM
from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised


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
    """How a random transform of torchvision's is done; None for anything else."""
    home = vision.home_of(type(transform))
    return None if home is None else RANDOM[home].get(type(transform).__name__)


def kinds_of(known: RandomTransform, transform: Any, value: Any) -> tuple[int, ...]:
    """What a transform draws for each of these images, or for a single one."""
    if type(value) is Rows:
        width, height = images.size(value)
    elif type(value).__module__ == "PIL.Image" and value.mode in ("L", "RGB"):
        width, height = value.size
    else:
        raise Unvectorised("a random transform of something else than a grey or an RGB image")
    return known.kinds(transform, height, width)


def _crop_kinds(transform: Any, height: int, width: int) -> tuple[int, ...]:
    down, across = _choices(transform, height, width)
    return () if (down, across) == (1, 1) else (down, across)


def _new_crop_kinds(transform: Any, height: int, width: int) -> tuple[int, ...]:
    """Version 2 draws no number where there is no choice."""
    return tuple(num for num in _choices(transform, height, width) if num > 1)


def _choices(transform: Any, height: int, width: int) -> tuple[int, int]:
    """From how many rows, and from how many columns, an image may be cropped."""
    left, top, right, bottom = _padding(transform)
    high, wide = height + top + bottom, width + left + right
    wanted = transform.size
    if transform.pad_if_needed or transform.padding_mode != "constant" or _fills_otherwise(transform):
        raise Unvectorised("`RandomCrop` with padding of another kind")
    if high < wanted[0] or wide < wanted[1] or max(high, wide) >= MOST_BELOW:
        raise Unvectorised("`RandomCrop` of images that are too small")
    return high - wanted[0] + 1, wide - wanted[1] + 1


def _fills_otherwise(transform: Any) -> bool:
    """Whether there is something else than 0 beside the image; version 2 has it twice, and reads the second."""
    fills = [transform.fill, *getattr(transform, "_fill", {}).values()]
    return any(type(fill) not in (int, float) or fill != 0 for fill in fills)


def _padding(transform: Any) -> tuple[int, int, int, int]:
    """Left, top, right, bottom."""
    padding = transform.padding
    if padding is None:
        return 0, 0, 0, 0
    parts = (padding,) if type(padding) is int else tuple(padding)
    if any(type(one) is not int or one < 0 for one in parts) or len(parts) not in (1, 2, 4):
        raise Unvectorised("`RandomCrop` with padding of another kind")
    if vision.home_of(type(transform)) == vision.NEW:
        if len(parts) != 4:
            raise Unvectorised("`RandomCrop` with padding of another kind")
        return parts[0], parts[2], parts[1], parts[3]
    left, top, right, bottom = {1: parts * 4, 2: parts * 2, 4: parts}[len(parts)]
    return left, top, right, bottom


def _cropped(transform: Any, pixels: np.ndarray, numbers: list[np.ndarray]) -> np.ndarray:
    left, top, _, _ = _padding(transform)
    high, wide = transform.size
    found = np.zeros((len(pixels), high, wide, *pixels.shape[3:]), np.uint8)
    drawn, never = iter(numbers), np.zeros(len(pixels), np.int64)
    kinds = _choices(transform, *pixels.shape[1:3])
    both = len(numbers) == 2
    rows, columns = [next(drawn) if both or (numbers and num > 1) else never for num in kinds]
    for image, out, row, column in zip(pixels, found, rows.tolist(), columns.tolist(), strict=True):
        part = image[max(row - top, 0) : max(row - top + high, 0), max(column - left, 0) : max(column - left + wide, 0)]
        down, across = max(top - row, 0), max(left - column, 0)
        out[down : down + part.shape[0], across : across + part.shape[1]] = part
    return found


def _flipped(axis: int) -> Callable[[Any, np.ndarray, list[np.ndarray]], np.ndarray]:
    def rows(transform: Any, pixels: np.ndarray, numbers: list[np.ndarray]) -> np.ndarray:
        if type(transform.p) not in (int, float) or not 0 <= transform.p <= 1:  # the versions differ in what NaN does
            raise Unvectorised("a chance that is no number")
        found = pixels.copy()
        which = np.flatnonzero(numbers[0] < np.float32(transform.p))
        found[which] = np.flip(pixels[which], axis)
        return found

    return rows


_FLIPS = {
    "RandomHorizontalFlip": RandomTransform(lambda *_: (UNIFORM,), _flipped(2)),
    "RandomVerticalFlip": RandomTransform(lambda *_: (UNIFORM,), _flipped(1)),
}

RANDOM: dict[str, dict[str, RandomTransform]] = {
    vision.OLD: {"RandomCrop": RandomTransform(_crop_kinds, _cropped), **_FLIPS},
    vision.NEW: {"RandomCrop": RandomTransform(_new_crop_kinds, _cropped), **_FLIPS},
}
"""By the module that they are imported from, and the name of the class."""
