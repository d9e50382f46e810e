"""Which operations of a dataset are known, and how is each done for many items at once?

The list: functions by identity, methods and attributes by exact type. What stands here computes its result from what
it is given and from nothing else, changes nothing, and gives the same bits for a row as for an item on its own: moving,
widening, and the four kinds of arithmetic, which IEEE 754 rounds alike wherever they are done. (A sine may differ in
the last bit with its place in a vector.) In: an operation of the script's. Out: an `Operation`, or None.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items import arrays, images, indexing, tensors, vision
from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised, each


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that a dataset does to values.

    Attributes:
        name: For people.
        plain: What the script calls.
        rows: The same where operands are `Rows`; what it gives is `Rows`, or one value where all items have the same.
        same: Whether all items have the same result.
        fresh: Whether the result is always in memory of its own.
        in_place: Whether it writes into its first operand, and gives that.
        spending: `rows` that puts the result where its second operand lies; None where there is no such way.
    """

    name: str
    plain: Callable[..., Any]
    rows: Callable[..., Any]
    same: bool = False
    fresh: bool = False
    in_place: bool = False
    spending: Callable[..., Any] | None = None


def of_function(function: Callable[..., Any]) -> Operation | None:
    """A function, or a class that is called, of the list."""
    name = getattr(function, "__name__", "")
    for module, names in _FUNCTIONS.items():
        if name in names and getattr(sys.modules.get(module), name, None) is function:
            return Operation(f"{module}.{name}".removeprefix("builtins."), function, names[name])
    return None


def of_method(kind: type, name: str) -> Operation | None:
    """A method of a known type."""
    known = _METHODS.get(_type_name(kind), {}).get(name)
    if known is None or (kind is torch.Tensor and not isinstance(getattr(kind, name), types.MethodDescriptorType)):
        return None  # or somebody has put a function of their own there
    return Operation(
        f"{kind.__name__}.{name}", getattr(kind, name), known,
        same=known is images.bands, fresh=name in _FRESH or name in tensors.IN_PLACE, in_place=name in tensors.IN_PLACE,
    )  # fmt: skip


def of_attribute(kind: type, name: str) -> Operation | None:
    """An attribute of a known type, all items having the same."""
    known = _ATTRIBUTES.get(_type_name(kind), {}).get(name)
    if known is None:
        return None
    return Operation(f"{kind.__name__}.{name}", operator.attrgetter(name), known, same=True)


def of_transform(transform: Any) -> Operation | None:
    """One of torchvision's transforms, as torchvision has it."""
    known = vision.known(transform)
    if known is None:
        return None
    return Operation(
        f"torchvision.{type(transform).__name__}", lambda self, value: self(value), known.rows,
        fresh=known.fresh, spending=known.spending,
    )  # fmt: skip


def of_operator(kind: type) -> Operation | None:
    """A binary operator, by the class of its syntax tree's node."""
    plain = _OPERATORS.get(kind.__name__)
    return None if plain is None else Operation(plain.__name__, plain, _arithmetic(plain), fresh=True)


def of_comparison(kind: type) -> Operation | None:
    """A comparison, by the class of its syntax tree's node."""
    plain = _COMPARISONS.get(kind.__name__)
    return None if plain is None else Operation(plain.__name__, plain, _compared(plain))


SUBSCRIPT = Operation("[]", operator.getitem, indexing.subscript)
SLICE = Operation("slice", slice, slice)


def _arithmetic(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Rows]:
    def rows(one: Any, other: Any) -> Rows:
        kinds = {value.kind for value in (one, other) if type(value) is Rows}
        if plain in (operator.floordiv, operator.mod) and not kinds <= {"int", "float"}:
            raise Unvectorised("a remainder of something else than Python's numbers")
        if "tensor" in kinds or isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return Rows("tensor", plain(*tensors.aligned(one, other)))
        if "array" in kinds:
            return Rows("array", plain(*arrays.aligned(one, other)))
        return arrays.arithmetic(plain, one, other)

    return rows


def _compared(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Rows]:
    def rows(one: Any, other: Any) -> Rows:
        one, other = _whole(one), _whole(other)
        num = len(one) if type(one) is Rows else len(other)
        sides = [each(value, num, (int, float, str)) for value in (one, other)]
        return Rows("truth", [plain(a, b) for a, b in zip(*sides, strict=True)])

    return rows


def _whole(value: Any) -> Any:
    """NumPy's integers as Python's, with which they compare alike."""
    if type(value) is Rows and value.kind == "scalar" and value.data.dtype.kind in "iu":
        return Rows("int", value.data.tolist())
    return value


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _dimensions(value: Rows) -> torch.Size | tuple[int, ...]:
    if value.kind not in ("tensor", "array"):
        raise Unvectorised("the shape of something else than a tensor or an array")
    shape = value.data.shape[1:]
    return torch.Size(shape) if value.kind == "tensor" else tuple(shape)


_OPERATORS = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv,
    "FloorDiv": operator.floordiv, "Mod": operator.mod,
}  # fmt: skip

_FRESH = ("clone", "copy", "add", "sub", "mul", "div", "neg", "abs", "clamp")

_COMPARISONS = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "Is": operator.is_, "IsNot": operator.is_not, "In": lambda one, other: one in other,
}  # fmt: skip

_FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "builtins": {"int": arrays.integer, "float": arrays.real},
    "numpy": arrays.FUNCTIONS,
    "torch": tensors.FUNCTIONS,
    "PIL.Image": {"fromarray": images.fromarray},
    "torchvision.datasets.utils": {"_Image_fromarray": images.fromarray},
    "torchvision.utils": {"_Image_fromarray": images.fromarray},
}

_METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.Tensor": tensors.METHODS,
    "numpy.ndarray": arrays.METHODS,
    "numpy.memmap": arrays.METHODS,
    "PIL.Image.Image": {"convert": images.convert, "getbands": images.bands},
    **{
        _type_name(kind): {"astype": arrays.astype, "item": arrays.integer}
        for kind in (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64)
    },
}

_ATTRIBUTES: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.Tensor": {"shape": _dimensions, "ndim": lambda value: len(_dimensions(value)),
                     "dtype": lambda value: tensors.of(value).dtype},
    "numpy.ndarray": {"shape": _dimensions, "ndim": lambda value: len(_dimensions(value)),
                      "dtype": lambda value: arrays.of(value).dtype},
    "PIL.Image.Image": {"size": images.size, "width": lambda value: images.size(value)[0],
                        "height": lambda value: images.size(value)[1]},
}  # fmt: skip
