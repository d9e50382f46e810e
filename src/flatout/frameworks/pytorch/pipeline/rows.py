"""What are the values of many items at once? One array for a value that every item has, with a row for each item.

Kinds are those that datasets handle: tensors, arrays, NumPy's scalars, images, numbers and anything else as a list.
In: values of single items. Out: `Rows`, and the batch that collating the single values would give.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

Kind: TypeAlias = Literal["tensor", "array", "scalar", "image", "int", "float", "str", "truth"]


class Unvectorised(Exception):
    """Something that is known for one item only; the message says what."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One value per item.

    Attributes:
        kind: What each of them is: a tensor, an array, a NumPy scalar, an image (`uint8`, grey or RGB), an `int` ...
        data: For `tensor` a tensor, for `str` a list, else an array; the first dimension is the item's.
    """

    kind: Kind
    data: Any

    def __len__(self) -> int:
        return len(self.data)


def kind_of(value: Any) -> Kind:
    """The kind of one item's value.

    Raises:
        Unvectorised: There is none for it: a subclass, a tensor on a device or with a history.
    """
    kind = type(value)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind is torch.Tensor:
        if value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad:
            return "tensor"
        raise Unvectorised("a tensor that is not a plain one on the CPU")
    if isinstance(value, np.generic):
        return "scalar"
    if _is_image(value):
        if value.mode in IMAGE_BANDS:
            return "image"
        raise Unvectorised(f"an image of mode {value.mode}")
    raise Unvectorised(f"a value of type `{kind.__module__}.{kind.__qualname__}`")


IMAGE_BANDS = {"L": 1, "RGB": 3}

_PLAIN: dict[type, Kind] = {int: "int", float: "float", str: "str", np.ndarray: "array", np.memmap: "array"}


def _is_image(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")
    return pil is not None and type(value) is pil.Image


def gathered(values: list[Any], kind: Kind) -> Rows:
    """Rows of single values that are all of one kind.

    Raises:
        Unvectorised: They are not, or an integer does not fit.
    """
    if kind == "str":
        if all(type(value) is str for value in values):
            return Rows("str", values)
    elif kind == "int":
        if all(type(value) is int for value in values):
            try:
                return Rows("int", np.array(values, dtype=np.int64))
            except OverflowError:
                raise Unvectorised("an integer beyond 64 bits") from None
    elif kind == "float" and all(type(value) is float for value in values):
        return Rows("float", np.array(values, dtype=np.float64))
    raise Unvectorised(f"values that are not all `{kind}`")


def collated(rows: Rows) -> Any:
    """What PyTorch's `default_collate` makes of the single values, in memory of its own."""
    if rows.kind == "tensor":
        return _owned(rows.data.contiguous())
    if rows.kind == "str":
        return rows.data
    if rows.kind in ("int", "float", "array", "scalar") and rows.data.dtype.kind in "biuf":
        return _owned(torch.from_numpy(np.ascontiguousarray(rows.data)))
    raise Unvectorised(f"a batch of `{rows.kind}`")


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that is PyTorch's and only its own, as stacking gives it."""
    storage = tensor.untyped_storage()
    if not storage.resizable() or storage.nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor.view(-1).view(tensor.shape)  # a dimension of one has the stride that stacking gives it
