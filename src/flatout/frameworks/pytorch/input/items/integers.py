"""Python's whole numbers, those of many items at once: as an `int64` array where they surely fit, else as a list.

Between which bounds the numbers lie is carried along, so that what may not fit is calculated by Python itself.
In: numbers, and operations on them. Out: `Rows` of the kind `int`, with the results that Python gives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from flatout.frameworks.pytorch.input.items.rows import Rows

FITS = 2**62
"""Numbers up to this one are calculated with as `int64`."""

Bounds = tuple[int, int]


def whole(values: Sequence[int]) -> Rows:
    """Rows of Python's whole numbers, of which there is at least one."""
    least, most = min(values), max(values)
    if least >= -FITS and most <= FITS:
        return Rows("int", np.array(values, np.int64), least, most)
    return Rows("int", list(values))


def of_array(data: np.ndarray) -> Rows:
    """The same numbers as Python's."""
    if data.dtype == np.uint64:
        return Rows("int", data.tolist())
    return Rows("int", data.astype(np.int64), *_limits(data.dtype))


@cache
def _limits(dtype: np.dtype[Any]) -> Bounds:
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def calculated(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Rows | None:
    """`operation` for each item; None where an operand is something else, or the result may not fit."""
    bounds_of = _BOUNDS.get(operation)
    left, right = _bounds(one), _bounds(other)
    if bounds_of is None or left is None or right is None:
        return None
    bounds = bounds_of(left, right)
    if bounds is None or bounds[0] < -FITS or bounds[1] > FITS:
        return None
    return Rows("int", operation(_data(one), _data(other)), *bounds)


def compared(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Rows | None:
    """A comparison for each item; None where an operand is something else."""
    if operation not in _COMPARISONS or _bounds(one) is None or _bounds(other) is None:
        return None
    return Rows("truth", operation(_data(one), _data(other)))


def _bounds(value: Any) -> Bounds | None:
    if type(value) is int:
        return (value, value) if -FITS <= value <= FITS else None
    if type(value) is Rows and value.kind == "int" and type(value.data) is np.ndarray:
        return value.least, value.most
    return None


def _data(value: Any) -> Any:
    return value.data if type(value) is Rows else value


def _product(left: Bounds, right: Bounds) -> Bounds:
    corners = [a * b for a in left for b in right]
    return min(corners), max(corners)


def _quotient(left: Bounds, right: Bounds) -> Bounds | None:
    divisor = right[0]
    return (left[0] // divisor, left[1] // divisor) if divisor == right[1] > 0 else None


def _remainder(left: Bounds, right: Bounds) -> Bounds | None:
    divisor = right[0]
    return (0, divisor - 1) if divisor == right[1] > 0 and max(-left[0], left[1]) <= FITS else None


_BOUNDS: dict[Callable[[Any, Any], Any], Callable[[Bounds, Bounds], Bounds | None]] = {
    operator.add: lambda left, right: (left[0] + right[0], left[1] + right[1]),
    operator.sub: lambda left, right: (left[0] - right[1], left[1] - right[0]),
    operator.mul: _product,
    operator.floordiv: _quotient,
    operator.mod: _remainder,
}
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
