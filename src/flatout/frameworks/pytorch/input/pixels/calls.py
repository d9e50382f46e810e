"""Which of PyTorch's calls on a tensor of pixels can be noted, to be done later channel by channel?

Those that move numbers or do one of the four kinds of arithmetic on each, with an operand that is a number or one per
channel. How the result lies in memory is found by doing the call on a tensor without memory. In: a call. Out: the
numbers and the layout of its result, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from flatout.frameworks.pytorch.input.pixels.elements import ARITHMETIC, Arithmetic, Elements, Erasure, number

MOST_OPERANDS = 64
"""Numbers in a tensor that is an operand; it is copied, as it may change meanwhile."""

FLOATS = (torch.float32, torch.float64)
"""Types of the results of arithmetic."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory.

    Attributes:
        shape: Its sizes.
        strides: Its strides.
        dtype: Its type.
        array: Whether the memory is NumPy's, pixel after pixel.
        view: Whether it is a view, as PyTorch calls it, of a tensor that nobody has.
        kind: Its class.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    array: bool = False
    view: bool = False
    kind: type[torch.Tensor] = torch.Tensor

    def bare(self) -> torch.Tensor:
        """A tensor of this layout without memory."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def place(self, axes: tuple[int, ...]) -> torch.Tensor:
        """Memory for it; `axes`: see `Elements`."""
        if not self.array:
            made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")
            return made[...] if self.view else made
        order = sorted(range(len(axes)), key=lambda dim: axes[dim])
        name = str(self.dtype).removeprefix("torch.")
        made = torch.from_numpy(np.empty([self.shape[dim] for dim in order], dtype=name))
        return made.permute([order.index(dim) for dim in range(len(axes))]) if self.view else made


@dataclass(frozen=True, slots=True)
class Noted:
    """What a call gives.

    Attributes:
        elements: The numbers of the result.
        layout: How it lies in memory.
        kind: Whether the result has memory of its own, is a view of the tensor, or is the tensor itself.
    """

    elements: Elements
    layout: Layout
    kind: Literal["own", "view", "itself"] = "own"


def noted(call: Any, elements: Elements, layout: Layout, operands: tuple[Any, ...], keywords: Any) -> Noted | None:
    """What a call on a tensor gives; None where that is not known without computing it."""
    note = _NOTES.get(call)
    if note is None or keywords or (layout.kind is not torch.Tensor and note not in (_as_subclass, _require_no_grad)):
        return None
    return note(elements, layout, operands)


def known(call: Any) -> bool:
    """Whether a call only asks for what is known of a tensor beforehand."""
    return call in _KNOWN


# -- moving --------------------------------------------------------------------------------------------------------


def _permute(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    dims = operands[0] if len(operands) == 1 and type(operands[0]) in (tuple, list) else operands
    num = len(layout.shape)
    if any(type(dim) is not int for dim in dims) or sorted(dim % num for dim in dims) != list(range(num)):
        return None
    dims = tuple(dim % num for dim in dims)
    shape, strides = (tuple(part[dim] for dim in dims) for part in (layout.shape, layout.strides))
    return Noted(elements.permuted(dims), replace(layout, shape=shape, strides=strides, view=True), "view")


def _transpose(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    num = len(layout.shape)
    if len(operands) != 2 or any(type(dim) is not int or not -num <= dim < num for dim in operands):
        return None
    dims = list(range(num))
    one, other = (dim % num for dim in operands)
    dims[one], dims[other] = dims[other], dims[one]
    return _permute(elements, layout, tuple(dims))


def _contiguous(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    if operands:
        return None
    if layout.bare().is_contiguous():
        return Noted(elements, layout, "itself")
    return Noted(elements, _result(layout, torch.Tensor.contiguous))


def _clone(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    return None if operands else Noted(elements, _result(layout, torch.clone))


def _as_subclass(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    kind = operands[0] if len(operands) == 1 else None
    kind = getattr(kind, "flatout_plain", kind)
    return Noted(elements, replace(layout, kind=kind, view=True), "view") if isinstance(kind, type) else None


def _require_no_grad(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    return Noted(elements, layout, "itself") if operands == (False,) else None


def _assign(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    """A rectangle in all channels is written over."""
    key, value = operands
    if elements.axes != (2, 0, 1) or type(key) is not tuple or len(key) != 3 or key[0] not in (..., slice(None)):
        return None
    if any(type(part) is not slice or part.step is not None for part in key[1:]):
        return None
    if type(value) is not torch.Tensor or value.dim() != 3 or value.requires_grad or value.device.type != "cpu":
        return None
    ends = (end for part in key[1:] for end in (part.start, part.stop))
    if any(end is not None and type(end) is not int for end in ends):
        return None
    region = [len(range(*part.indices(size))) for part, size in zip(key[1:], layout.shape[1:], strict=True)]
    if any(size not in (1, whole) for size, whole in zip(value.shape, (layout.shape[0], *region), strict=True)):
        return None
    values = elements.by_pixel(value.to(layout.dtype, copy=True).numpy())
    return Noted(elements.then(Erasure(key[1], key[2], values)), layout, "itself")


# -- types ---------------------------------------------------------------------------------------------------------


def _to(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    dtype = operands[0] if len(operands) == 1 else None
    if type(dtype) is not torch.dtype:
        return None
    if dtype is layout.dtype:
        return Noted(elements, layout, "itself")
    if dtype not in FLOATS or layout.dtype is not torch.uint8:
        return None
    return Noted(elements, _result(layout, torch.Tensor.to, dtype))


def _float(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    return None if operands else _to(elements, layout, (torch.float32,))


def _double(elements: Elements, layout: Layout, operands: tuple[Any, ...]) -> Noted | None:
    return None if operands else _to(elements, layout, (torch.float64,))


# -- arithmetic ----------------------------------------------------------------------------------------------------


def arithmetic(
    name: str, elements: Elements, layout: Layout, operands: tuple[Any, ...], *, in_place: bool = False
) -> Noted | None:
    """One of `add`, `sub`, `mul` and `div` with a number, or a tensor that has one number for each channel."""
    if len(operands) != 1:
        return None
    operand = operands[0]
    dtype = layout.dtype
    if dtype is torch.uint8 and not in_place and type(operand) in ((float, int) if name == "div" else (float,)):
        dtype = torch.get_default_dtype()
    if dtype not in FLOATS:
        return None
    if type(operand) in (float, int):
        values = number(operand, str(dtype).removeprefix("torch."))
        result = _calculated(replace(layout, dtype=dtype), ())
    elif _is_simple(operand, layout):
        values = elements.by_pixel(operand.clone().numpy())
        result = _calculated(layout, tuple(operand.shape))
    else:
        return None
    found = elements.then(Arithmetic(name, values))
    return Noted(found, layout, "itself") if in_place else Noted(found, result)


def normalized(
    elements: Elements, layout: Layout, mean: tuple[float, ...], std: tuple[float, ...], *, in_place: bool
) -> Noted | None:
    """What torchvision's `normalize` gives; None where it would raise, or does something else."""
    if layout.dtype not in FLOATS or elements.axes != (2, 0, 1) or layout.kind is not torch.Tensor:
        return None
    values = _per_channel(mean, std, layout.shape[0], layout.dtype)
    if values is None:
        return None
    found = elements.then(Arithmetic("sub", values[0])).then(Arithmetic("div", values[1]))
    return Noted(found, layout, "itself") if in_place else Noted(found, _result(layout, torch.clone))


@lru_cache(maxsize=64)
def _per_channel(
    mean: tuple[float, ...], std: tuple[float, ...], num: int, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray] | None:
    if len(mean) not in (1, num) or len(std) not in (1, num):
        return None
    one, other = (torch.as_tensor(values, dtype=dtype, device="cpu") for values in (mean, std))
    if bool((other == 0).any()):
        return None
    return one.view(1, 1, -1).numpy(), other.view(1, 1, -1).numpy()


def _is_simple(operand: Any, layout: Layout) -> bool:
    """Whether an operand is a small tensor of the same type that is repeated along the dimensions."""
    if type(operand) is not torch.Tensor or operand.dtype is not layout.dtype or operand.numel() > MOST_OPERANDS:
        return False
    if operand.layout is not torch.strided or operand.device.type != "cpu" or operand.requires_grad:
        return False
    sizes = zip(reversed(operand.shape), reversed(layout.shape), strict=False)
    return operand.dim() <= len(layout.shape) and all(size in (1, whole) for size, whole in sizes)


def _arithmetic(name: str, *, in_place: bool = False) -> Callable[..., Noted | None]:
    return lambda elements, layout, operands: arithmetic(name, elements, layout, operands, in_place=in_place)


@lru_cache(maxsize=512)
def _calculated(layout: Layout, operand: tuple[int, ...]) -> Layout:
    """How the result of arithmetic lies in memory; `operand`: the shape of the other, which is no larger.

    Without memory (`meta`) PyTorch would ask its compiler, at a second for loading it: so it is done with zeros, but
    for the usual case, in which the result lies as the operand does.
    """
    if not (_is_dense(layout) and min(layout.shape, default=0) > 1):
        zeros = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="cpu").zero_()
        made = torch.mul(zeros, torch.zeros(operand, dtype=layout.dtype, device="cpu"))
        return Layout(tuple(made.shape), made.stride(), made.dtype)
    return Layout(layout.shape, layout.strides, layout.dtype)


def _is_dense(layout: Layout) -> bool:
    """Whether it fills its memory, each place once."""
    expected = 1
    for stride, size in sorted(zip(layout.strides, layout.shape, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=512)
def _result(layout: Layout, call: Callable[..., Any], operand: Any = None) -> Layout:
    """How the result of a call lies in memory; `operand`: another one as it is."""
    made = call(layout.bare()) if operand is None else call(layout.bare(), operand)
    return Layout(tuple(made.shape), made.stride(), made.dtype)


# -- the calls -----------------------------------------------------------------------------------------------------

_TENSOR = torch.Tensor
_KINDS = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div"}
_NOTES: dict[Any, Callable[[Elements, Layout, tuple[Any, ...]], Noted | None]] = {
    _TENSOR.permute: _permute, torch.permute: _permute, _TENSOR.transpose: _transpose, torch.transpose: _transpose,
    _TENSOR.as_subclass: _as_subclass, _TENSOR.__setitem__: _assign, _TENSOR.requires_grad_: _require_no_grad,
    _TENSOR.contiguous: _contiguous, _TENSOR.clone: _clone, torch.clone: _clone,
    _TENSOR.to: _to, _TENSOR.type: _to, _TENSOR.float: _float, _TENSOR.double: _double,
    **{getattr(torch, kind): _arithmetic(kind) for kind in ARITHMETIC},
    **{getattr(_TENSOR, kind): _arithmetic(kind) for kind in ARITHMETIC},
    **{getattr(_TENSOR, f"{kind}_"): _arithmetic(kind, in_place=True) for kind in ARITHMETIC},
    **{getattr(_TENSOR, f"__{name}__"): _arithmetic(kind) for name, kind in _KINDS.items() if name != "div"},
    **{getattr(_TENSOR, f"__i{name}__"): _arithmetic(kind, in_place=True) for name, kind in _KINDS.items()
       if name != "div"},
}  # fmt: skip

_KNOWN = frozenset((
    _TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.stride, _TENSOR.is_floating_point, _TENSOR.is_contiguous,
    _TENSOR.is_complex, _TENSOR.element_size, _TENSOR.nelement, _TENSOR.ndimension, _TENSOR.__len__,
    *(
        getattr(_TENSOR, name).__get__
        for name in (
            "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse", "is_nested",
            "is_quantized", "is_leaf", "itemsize", "nbytes",
        )
    ),
))  # fmt: skip
