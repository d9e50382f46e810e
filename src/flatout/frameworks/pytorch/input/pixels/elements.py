"""Which numbers does a tensor of pixels hold? The pixels of a picture, and the arithmetic that is done on each of them.

The four kinds of arithmetic give the same bits wherever they are done, so they are done here channel by channel, on one
thread, straight into the memory where the tensor is to lie. In: a picture and operations. Out: numbers in an array.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from flatout.frameworks.pytorch.input.pixels.memory import pixels_of
from flatout.frameworks.pytorch.input.pixels.pictures import Picture

CHANNELS = {"L": 1, "RGB": 3}
"""Modes of pictures whose pixels are known as numbers."""

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}

_SCALED = ("mul", "div")
"""Of which the result is the same where both operands are larger by a power of two, or one is and the other smaller."""

LEAST_SCALED, MOST_SCALED = 2.0**-90, 2.0**90
"""Between which an operand is that, for neither it nor the result leaves the range of its type."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One operation on each number.

    Attributes:
        name: Of `ARITHMETIC`.
        operand: The second operand, `[height or 1, width or 1, channels or 1]`.
    """

    name: str
    operand: np.ndarray


@dataclass(frozen=True, slots=True)
class Erasure:
    """A part that is written over.

    Attributes:
        rows: From and to.
        columns: From and to.
        values: What is written, `[height or 1, width or 1, channels or 1]`.
    """

    rows: slice
    columns: slice
    values: np.ndarray


Step: TypeAlias = Arithmetic | Erasure


@dataclass(frozen=True, slots=True)
class Elements:
    """The numbers of a tensor.

    Attributes:
        picture: Where the pixels are.
        axes: For each dimension of the tensor, which of height, width and channels (0 to 2) it is.
        steps: What is done to the numbers, in order; each tensor has its own.
    """

    picture: Picture
    axes: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> Elements:
        """With one more operation."""
        return replace(self, steps=(*self.steps, step))

    def permuted(self, dims: tuple[int, ...]) -> Elements:
        """With the dimensions in another order."""
        return replace(self, axes=tuple(self.axes[dim] for dim in dims))

    def by_pixel(self, array: np.ndarray) -> np.ndarray:
        """An array that is laid out as the tensor, as `[height, width, channels]`."""
        absent = [axis for axis in range(3) if axis not in self.axes]
        array = array.reshape((1,) * (len(self.axes) - array.ndim) + array.shape + (1,) * len(absent))
        axes = (*self.axes, *absent)
        return array.transpose([axes.index(axis) for axis in range(3)])

    def fill(self, target: np.ndarray) -> None:
        """Compute the numbers into an array that is laid out as the tensor.

        Raises:
            Exception: Whatever PIL raises.
        """
        pixels, _memory = pixels_of(self.picture.image())
        with np.errstate(all="ignore"):  # PyTorch says nothing of numbers that are not finite
            self._fill(pixels, self.by_pixel(target))

    def _fill(self, pixels: np.ndarray, target: np.ndarray) -> None:
        words = _words(pixels)
        masked = None if words is None else np.empty_like(words)
        for channel in range(CHANNELS[self.picture.mode]):
            into, first = target[..., channel], self.steps[0] if self.steps else None
            values = pixels if pixels.ndim == 2 else pixels[..., channel]
            if not isinstance(first, Arithmetic) or first.name not in _SCALED or first.operand.size > 1:
                np.copyto(into, values, casting="unsafe")
                rest = self.steps
            else:
                operand, rest = first.operand.reshape(()), self.steps[1:]
                if words is not None and LEAST_SCALED < abs(operand) < MOST_SCALED:
                    # of one word the channels are larger by a power of two
                    values = np.bitwise_and(words, 255 << 8 * channel, out=masked)
                    operand = np.ldexp(operand, 8 * channel if first.name == "div" else -8 * channel)
                ARITHMETIC[first.name](values, operand, out=into, dtype=into.dtype, casting="unsafe")
            for step in rest:
                _do(step, into, channel)


def _words(pixels: np.ndarray) -> np.ndarray | None:
    """The pixels as one word each, the first channel in its lowest byte; None where they do not lie so."""
    if pixels.ndim == 2 or pixels.shape[2] != 4 or not pixels.flags.c_contiguous or sys.byteorder != "little":
        return None
    return pixels.view(np.int32)[..., 0]


def number(value: float, kind: str) -> np.ndarray:
    """An operand that is the same for all; `kind`: the name of a type."""
    with np.errstate(all="ignore"):
        return np.full((1, 1, 1), value, dtype=kind)


def _do(step: Step, into: np.ndarray, channel: int) -> None:
    if isinstance(step, Erasure):
        into[step.rows, step.columns] = _of_channel(step.values, channel)
    else:
        ARITHMETIC[step.name](into, _of_channel(step.operand, channel), out=into)


def _of_channel(values: np.ndarray, channel: int) -> np.ndarray:
    return values[..., channel if values.shape[2] > 1 else 0]
