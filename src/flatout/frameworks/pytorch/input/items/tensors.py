"""What datasets do with tensors, done for those of many items at once. In: `Rows` and operands. Out: `Rows`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised, is_plain

_NUMBERS = (int, float, bool)


def elementwise(name: str) -> Callable[..., Rows]:
    """A method whose result at each place depends on the operands at that place."""

    def rows(value: Any, *operands: Any, **keywords: Any) -> Rows:
        data = of(value)
        if operands or keywords:
            calculable(data)
        beside = [_beside(data, operand) for operand in operands]
        if "alpha" in keywords or (name == "clamp" and any(isinstance(one, torch.Tensor) for one in beside)):
            raise Unvectorised(f"`{name}` in a form that may round otherwise")
        return Rows("tensor", getattr(data, name)(*beside, **{k: _plain(v) for k, v in keywords.items()}))

    return rows


def of(value: Any) -> torch.Tensor:
    """The rows of a tensor."""
    if type(value) is not Rows or value.kind != "tensor":
        raise Unvectorised("an operand of another kind than when it was read")
    return value.data


def calculable(data: torch.Tensor) -> None:
    """Arithmetic that gives the same bits wherever a number stands: not that of half precision, with its NaNs."""
    if data.dtype in (torch.float16, torch.bfloat16):
        raise Unvectorised("arithmetic in half precision")


def aligned(one: Any, other: Any) -> tuple[Any, Any]:
    """Two operands of arithmetic, of which at least one is a row of tensors, so that broadcasting pairs items."""
    data = of(one if type(one) is Rows else other)
    calculable(data)
    return (data, _beside(data, other)) if type(one) is Rows else (_beside(data, one), data)


def _beside(data: torch.Tensor, operand: Any) -> Any:
    """An operand as it stands beside rows."""
    if type(operand) is Rows:
        if operand.kind == "tensor" and operand.data.dim() == data.dim():
            calculable(operand.data)
            return operand.data
        raise Unvectorised("values of items that have different numbers of dimensions")
    if isinstance(operand, torch.Tensor):
        if (
            type(operand) is not torch.Tensor
            or not is_plain(operand)
            or operand.dim() > data.dim() - 1
            or data.dim() == 1
        ):
            raise Unvectorised("a tensor that would widen each item")
        return operand
    return _plain(operand)


def _plain(operand: Any) -> Any:
    if type(operand) in _NUMBERS or operand is None or isinstance(operand, torch.dtype):
        return operand
    raise Unvectorised(f"an operand of type `{type(operand).__name__}`")


def to(value: Any, *operands: Any, **keywords: Any) -> Rows:
    """`tensor.to(dtype)`, no device."""
    dtype = operands[0] if operands else keywords.get("dtype")
    if not isinstance(dtype, torch.dtype) or len(operands) + len(keywords) != 1:
        raise Unvectorised("`to` with more than a dtype")
    return Rows("tensor", of(value).to(dtype))


def unsqueeze(value: Any, dim: int) -> Rows:
    """A dimension more in each item."""
    data = of(value)
    return Rows("tensor", data.unsqueeze(_dim(dim, data.dim())))


def permute(value: Any, *dims: Any) -> Rows:
    """Each item's dimensions in another order."""
    data = of(value)
    return Rows("tensor", data.permute(0, *[_dim(dim, data.dim() - 1) for dim in _spread(dims)]))


def transpose(value: Any, first: int, second: int) -> Rows:
    """Two of each item's dimensions exchanged."""
    data = of(value)
    return Rows("tensor", data.transpose(_dim(first, data.dim() - 1), _dim(second, data.dim() - 1)))


def view(value: Any, *sizes: Any) -> Rows:
    """Each item in another shape."""
    data, sizes = of(value), _spread(sizes)
    if any(type(size) is not int for size in sizes) or not len(data):
        raise Unvectorised("`view` as something else")
    return Rows("tensor", data.reshape(len(data), *_shape(tuple(data.shape[1:]), tuple(sizes))))


@lru_cache(maxsize=256)
def _shape(of: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that sizes mean, of which one may be -1."""
    return tuple(torch.empty(of, device="meta").reshape(sizes).shape)


def flatten(value: Any, start_dim: int = 0, end_dim: int = -1) -> Rows:
    """Some of each item's dimensions as one."""
    data = of(value)
    if data.dim() == 1:
        return Rows("tensor", data.unsqueeze(1))
    return Rows("tensor", data.flatten(_dim(start_dim, data.dim() - 1), _dim(end_dim, data.dim() - 1)))


def _dim(dim: Any, num_dims: int) -> int:
    """The place in rows of an item's dimension, of which there are `num_dims`."""
    if type(dim) is not int or not -num_dims <= dim < num_dims:
        raise Unvectorised("a dimension that items do not have")
    return dim + 1 if dim >= 0 else num_dims + 1 + dim


def _spread(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else values


def numpy(value: Any) -> Rows:
    """Each item's tensor as an array."""
    return Rows("array", of(value).numpy())


def item(value: Any) -> Rows:
    """The number in each item's tensor."""
    data = of(value)
    if data.dim() != 1:
        raise Unvectorised("`item` of a tensor with dimensions")
    if data.dtype is torch.bool or data.is_complex():
        raise Unvectorised("a truth value, or a complex one")
    return Rows("float" if data.dtype.is_floating_point else "int", data.tolist())


def from_numpy(value: Any) -> Rows:
    """Each item's array as a tensor."""
    if type(value) is Rows and value.kind == "array":
        data = value.data if value.data.flags.writeable else value.data.copy()
        return Rows("tensor", torch.from_numpy(np.asarray(data)))
    raise Unvectorised("`from_numpy` of something else than an array")


def tensor(value: Any, dtype: torch.dtype | None = None) -> Rows:
    """`torch.tensor` and `torch.as_tensor`."""
    if type(value) is not Rows or not (dtype is None or isinstance(dtype, torch.dtype)):
        raise Unvectorised("`tensor` of several values")
    kind, data = value.kind, value.data
    if kind == "scalar" and data.dtype.kind in "iu" and dtype is not None:
        kind, data = "int", data.tolist()
    if kind == "int":
        fitting = _fitting(data, torch.int64 if dtype is None else dtype)
        return Rows("tensor", torch.tensor(fitting, dtype=dtype))
    if kind == "float":
        wanted = torch.get_default_dtype() if dtype is None else dtype
        return Rows("tensor", torch.tensor(_fitting(data, wanted), dtype=wanted))
    if kind in ("array", "scalar"):
        found = torch.from_numpy(np.array(data))
    elif kind == "tensor":
        found = data.clone()
    else:
        raise Unvectorised(f"`tensor` of `{kind}`")
    if kind == "scalar" and dtype not in (None, found.dtype):
        raise Unvectorised("a NumPy scalar as another type")
    return Rows("tensor", found if dtype is None else found.to(dtype))


def _fitting(values: list[Any], dtype: torch.dtype) -> list[Any]:
    """Numbers that the type holds, so that one alone would be taken as well, and rounded once."""
    whole = all(type(value) is int for value in values)
    if whole and not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool:
        limits = torch.iinfo(dtype)
        if all(limits.min <= value <= limits.max for value in values):
            return values
    elif dtype in (torch.float32, torch.float64):
        most = 2**53 if whole else torch.finfo(dtype).max
        if all(-most <= value <= most for value in values):
            return values
    raise Unvectorised("numbers that the type may not hold")


ELEMENTWISE = (
    *("float", "double", "half", "bfloat16", "long", "int", "short", "byte", "bool", "char"),
    *("add", "sub", "mul", "div", "neg", "abs", "clamp", "clone", "contiguous", "detach"),
)
IN_PLACE = ("add_", "sub_", "mul_", "div_")
METHODS: dict[str, Callable[..., Any]] = {
    **{name: elementwise(name) for name in (*ELEMENTWISE, *IN_PLACE)},
    "to": to, "type": to, "unsqueeze": unsqueeze, "permute": permute, "transpose": transpose, "view": view,
    "reshape": view, "flatten": flatten, "numpy": numpy, "item": item,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "from_numpy": from_numpy, "tensor": tensor, "as_tensor": tensor, "unsqueeze": unsqueeze, "flatten": flatten,
    "permute": permute, "transpose": transpose,
}  # fmt: skip
