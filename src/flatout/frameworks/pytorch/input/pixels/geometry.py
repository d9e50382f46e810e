"""What size and mode does a call on an image give? Known beforehand for calls with plain numbers; None for any other.

In: what a call is given. Out: sizes as PIL computes them.
"""

from __future__ import annotations

from typing import Any

from PIL import Image

MODES = ("L", "RGB", "RGBA")
"""Modes of images that are computed later."""

CONVERTED = {"L": ("L", "RGB"), "RGB": ("L", "RGB"), "RGBA": ("L", "RGB", "RGBA"), "LA": ("L", "RGB"), "CMYK": ("RGB",)}
"""Conversions, by the mode of the image, that neither warn nor depend on anything but the pixels."""

_SWAPPED = (
    Image.Transpose.ROTATE_90,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.TRANSVERSE,
)
_SIMPLE = (int, float, bool, str, type(None))


def constants(values: Any) -> tuple[Any, ...] | None:
    """Plain numbers, and tuples and lists of them, as they are now; None where there is anything else."""
    found = []
    for value in values:
        if type(value) in (tuple, list):
            parts = constants(value)
            if parts is None:
                return None
            value = parts if type(value) is tuple else list(parts)
        elif not isinstance(value, _SIMPLE):  # PIL's enumerations are integers
            return None
        found.append(value)
    return tuple(found)


def converts(mode: str, wanted: Any, info: dict[Any, Any] | None) -> bool:
    """Whether an image of a mode can be converted later; `info`: what is known to stand beside its pixels."""
    return wanted in CONVERTED.get(mode, ()) and "transparency" not in (info or ())


def size_of_crop(box: Any) -> tuple[int, int] | None:
    """Of `crop`."""
    if type(box) not in (tuple, list) or len(box) != 4 or any(type(side) not in (int, float) for side in box):
        return None
    left, upper, right, lower = (round(side) for side in box)
    width, height = right - left, lower - upper
    if min(width, height) < 1 or width * height > (Image.MAX_IMAGE_PIXELS or float("inf")):
        return None
    return width, height


def rows_of_crop(box: Any, size: tuple[int, int]) -> int:
    """How many upper rows of an image of `size` a crop takes."""
    left, upper, right, lower = (round(side) for side in box)
    inside = left >= 0 and upper >= 0 and right <= size[0] and lower <= size[1]
    return lower if inside else size[1]


def size_of_resize(size: Any) -> tuple[int, int] | None:
    """Of `resize`."""
    if type(size) not in (tuple, list) or len(size) != 2 or any(type(side) is not int or side < 1 for side in size):
        return None
    return size[0], size[1]


def size_of_transpose(size: tuple[int, int], method: Any) -> tuple[int, int] | None:
    """Of `transpose`."""
    if not isinstance(method, int) or method not in tuple(Image.Transpose):
        return None
    return (size[1], size[0]) if method in _SWAPPED else size


def size_of_pad(size: tuple[int, int], padding: Any) -> tuple[int, int] | None:
    """Of torchvision's `pad` with constant values."""
    sides = (padding,) if type(padding) is int else tuple(padding) if type(padding) in (tuple, list) else ()
    if len(sides) not in (1, 2, 4) or any(type(side) is not int or side < 0 for side in sides):
        return None
    left, upper, right, lower = sides if len(sides) == 4 else sides * (4 // len(sides))
    return size[0] + left + right, size[1] + upper + lower
