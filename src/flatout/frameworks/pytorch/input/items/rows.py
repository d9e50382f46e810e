"""What are the values of many items at once? One array for a value that every item has, with a row for each item.

Kinds are those that datasets handle: tensors, arrays, NumPy's scalars, images, numbers and anything else as a list.
In: values of single items. Out: `Rows`, and the batch that collating the single values would give.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

Kind: TypeAlias = Literal["tensor", "image_tensor", "array", "scalar", "image", "int", "float", "str", "truth"]


class Unvectorised(Exception):
    """Something that is known for one item only, or is not as it was read; whatever works on `Rows` raises it."""


@dataclass(slots=True, eq=False)  # not frozen: there are dozens for each batch
class Rows:
    """One value per item.

    Attributes:
        kind: What each of them is: a tensor, one of torchvision's images that are tensors, an array, a NumPy scalar, an
            image (`uint8`, grey or RGB), an `int` ...
        data: For `tensor` and `image_tensor` a tensor, for `array`, `scalar` and `image` an array, each with the items
            as its first dimension; for Python's own values a list of them, so that arithmetic is Python's.
    """

    kind: Kind
    data: Any

    def __len__(self) -> int:
        return len(self.data)


class OneThread:
    """Inside, tensors are computed on one thread: beside a busy neighbour a gather on two waits for the slower one."""

    __slots__ = ("_num",)

    def __enter__(self) -> None:
        self._num = torch.get_num_threads()
        if self._num > 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._num > 1:
            torch.set_num_threads(self._num)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies densely on the CPU and has no history."""
    usual = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    return usual and not tensor.requires_grad and tensor.dtype not in _ODD


def kind_of(value: Any) -> Kind:
    """The kind of one item's value."""
    kind = type(value)
    if kind in _PLAIN and not isinstance(value, np.ndarray):
        return _PLAIN[kind]
    if kind is torch.Tensor or kind is getattr(sys.modules.get("torchvision.tv_tensors"), "Image", None):
        if is_plain(value):
            return "tensor" if kind is torch.Tensor else "image_tensor"
        raise Unvectorised("a tensor that is not a plain one on the CPU")
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return "scalar"
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
        raise Unvectorised("an array of something else than numbers")
    if kind in _PLAIN:
        return _PLAIN[kind]
    if _is_image(value):
        if value.mode in IMAGE_MODES:
            return "image"
        raise Unvectorised(f"an image of mode {value.mode}")
    raise Unvectorised(f"a value of type `{kind.__module__}.{kind.__qualname__}`")


_ODD = (torch.uint16, torch.uint32, torch.uint64)
"""Types that most of PyTorch's operations do not know."""

IMAGE_MODES = ("L", "RGB")

_PLAIN: dict[type, Kind] = {int: "int", float: "float", str: "str", np.ndarray: "array", np.memmap: "array"}


def _is_image(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")
    return pil is not None and type(value) is pil.Image


def gathered(values: list[Any], kind: type) -> Rows:
    """Rows of Python's own values, which are all of one type."""
    if kind not in (int, float, str) or {*map(type, values)} != {kind}:
        raise Unvectorised("values that are not all of one type")
    return Rows(_PLAIN[kind], values)


def each(value: Any, num: int, types: tuple[type, ...]) -> list[Any]:
    """The value of each of `num` items, where it is of one of these types of Python's own."""
    if type(value) is Rows and value.kind in [_PLAIN[kind] for kind in types]:
        return list(value.data)
    if type(value) in types:
        return [value] * num
    raise Unvectorised("an operand of another type than Python's own numbers or text")


def collated(rows: Rows) -> Any:
    """What PyTorch's `default_collate` makes of the single values, in memory of its own."""
    if rows.kind in ("tensor", "image_tensor"):
        return _stacked(rows.data)
    if rows.kind == "str":
        return rows.data
    if rows.kind == "int":
        batch = torch.empty(len(rows.data), dtype=torch.int64)
        batch.numpy()[:] = rows.data  # a third of what `torch.tensor` takes
        return batch
    if rows.kind == "float":
        return torch.tensor(rows.data, dtype=torch.float64)
    if rows.kind in ("array", "scalar") and rows.data.dtype.kind in "biuf":
        return _owned(torch.from_numpy(np.ascontiguousarray(rows.data)))
    raise Unvectorised(f"a batch of `{rows.kind}`")


def _stacked(data: torch.Tensor) -> torch.Tensor:
    """What `torch.stack` makes of the tensors: row by row, or with their channels last where they lie so."""
    if data.is_contiguous() or stacks_densely(data.shape[1:], data.stride()[1:], data.dtype):
        return _owned(data.contiguous())
    if data.dim() != 4 or not data[:1].is_contiguous(memory_format=torch.channels_last):
        raise Unvectorised("tensors that `torch.stack` does not put together row by row, nor with their channels last")
    last = _owned(data.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1))
    strides = [_usual_strides(last.shape)[dim] for dim in (0, 3, 1, 2)]
    return torch.empty(0, dtype=data.dtype).set_(last.untyped_storage(), 0, data.shape, strides)


@lru_cache(maxsize=256)
def stacks_densely(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether stacked tensors of this layout lie one after another, each row by row."""
    one = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return torch.stack([one, one]).is_contiguous()


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor in memory of its own, as stacking gives it: no view, in the usual strides."""
    storage = tensor.untyped_storage()
    if not storage.resizable() or storage.nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    wanted = _usual_strides(tensor.shape)
    if tensor._is_view() or tensor.stride() != wanted:
        return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, tensor.shape, wanted)
    return tensor


@lru_cache(maxsize=64)
def _usual_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
