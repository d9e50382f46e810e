"""What datasets do with arrays and numbers, for those of many items at once. In: `Rows` and operands. Out: `Rows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised, each, gathered


def of(value: Any) -> np.ndarray:
    """The rows of an array with dimensions."""
    if type(value) is not Rows or value.kind not in ("array", "image"):
        raise Unvectorised("an operand of another kind than when it was read")
    return np.asarray(value.data)


def array(value: Any, dtype: Any = None, *, copy: bool = True) -> Rows:
    """`np.array` and `np.asarray` of an image or an array."""
    data = of(value)
    return Rows("array", data) if dtype is None else astype(Rows("array", data), dtype)


def astype(value: Any, dtype: Any) -> Rows:
    """Each item's array, or NumPy scalar, in another width."""
    scalar = type(value) is Rows and value.kind == "scalar"
    data = value.data if scalar else of(value)
    if data.dtype.kind == "f" and np.dtype(dtype) in (np.uint32, np.uint64):
        raise Unvectorised("floats as unsigned integers")
    return Rows("scalar" if scalar else "array", data.astype(np.dtype(dtype)))


def copy(value: Any) -> Rows:
    """A copy of each item's array."""
    return Rows("array", of(value).copy())


def reshape(value: Any, *sizes: Any) -> Rows:
    """Each item in another shape."""
    data = of(value)
    if not len(data):
        raise Unvectorised("nothing to take a shape from")
    shape = data[0].reshape(*sizes).shape
    return Rows("array", data.reshape(len(data), *shape))


def transpose(value: Any, *axes: Any) -> Rows:
    """Each item's dimensions in another order."""
    data = of(value)
    order = tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
    num = data.ndim - 1
    if not order:
        order = tuple(reversed(range(num)))
    if sorted(axis % num for axis in order) != list(range(num)):
        raise Unvectorised("an order of dimensions that items do not have")
    return Rows("array", data.transpose(0, *[axis % num + 1 for axis in order]))


def expand_dims(value: Any, axis: int) -> Rows:
    """A dimension more in each item."""
    data = of(value)
    if type(axis) is not int or not -data.ndim <= axis < data.ndim:
        raise Unvectorised("a dimension that items do not have")
    return Rows("array", np.expand_dims(data, axis + 1 if axis >= 0 else axis))


def integer(value: Any) -> Rows:
    """`int` of each item's number."""
    if type(value) is Rows and value.kind == "int":
        return value
    data = _scalars(value, "iu")
    return Rows("int", [int(one) for one in value.data] if data is None else data.tolist())


def real(value: Any) -> Rows:
    """`float` of each item's number."""
    data = _scalars(value, "iuf")
    return Rows("float", [float(one) for one in (value.data if data is None else data.tolist())])


def _scalars(value: Any, kinds: str) -> np.ndarray | None:
    """Each item's NumPy scalar, or tensor without dimensions, of these kinds; None where they are Python's numbers."""
    if type(value) is Rows:
        if value.kind in ("int", "float"):
            return None
        if value.kind in ("scalar", "tensor"):
            data = np.asarray(value.data)
            if data.ndim == 1 and data.dtype.kind in kinds and data.dtype.itemsize <= 8:
                return data
    raise Unvectorised("a number of something else")


def aligned(one: Any, other: Any) -> tuple[Any, Any]:
    """Two operands of arithmetic with an array, so that broadcasting pairs items."""
    data = next(value.data for value in (one, other) if type(value) is Rows and value.kind == "array")
    if data.dtype == np.float16:
        raise Unvectorised("arithmetic in half precision")
    return _beside(data, one), _beside(data, other)


def _beside(data: np.ndarray, operand: Any) -> Any:
    if type(operand) is Rows:
        if operand.kind == "array" and operand.data.ndim == data.ndim:
            return np.asarray(operand.data)
    elif type(operand) in (int, float) or (isinstance(operand, np.ndarray | np.generic) and operand.ndim < data.ndim):
        return operand
    raise Unvectorised("values of items that cannot be paired")


def arithmetic(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Rows:
    """Python's own arithmetic, with each item's number."""
    if type(one) is Rows and one.kind == "int" and type(other) is int:
        values = [operation(a, other) for a in one.data]
    else:
        num = len(one) if type(one) is Rows else len(other)
        values = list(map(operation, *[each(value, num, (int, float)) for value in (one, other)]))
    return gathered(values, type(values[0]))


METHODS: dict[str, Callable[..., Any]] = {
    "astype": astype, "copy": copy, "reshape": reshape, "transpose": transpose,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "array": array, "asarray": array, "ascontiguousarray": array, "expand_dims": expand_dims, "transpose": transpose,
}  # fmt: skip
