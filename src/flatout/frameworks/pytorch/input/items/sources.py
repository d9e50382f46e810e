"""What are items made of, and is it still what it was when they were kept?

An item follows from what is taken out of the dataset for it, and from what all items share. Both are looked at with
each batch: tensors by PyTorch's own count of their changes, arrays and lists by what they are, all else by value. What
is written into arrays and lists is seen with the next pass, for which their bytes are read. In: a program, a dataset.
Out: marks, to be compared with former ones.
"""

from __future__ import annotations

import contextlib
import pickle
import types
import zlib
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items import vision
from flatout.frameworks.pytorch.input.items.program import Program, Slot, straight_line
from flatout.frameworks.pytorch.input.items.rows import Unvectorised

MOST_BYTES = 2**16
"""Of an array that all items share: it is compared with each batch."""

MOST_PARTS = 64

MOST_READ_BYTES = 256 * 2**20
"""Of an array whose bytes are read with each pass (some 0.1 s)."""

MOST_ITEMS = 1_000_000
"""Of a list that is gone through with each pass (some 0.1 s)."""

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))

_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, type, torch.dtype, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.dtype),
)


class Sources:
    """What the items of one program are made of."""

    def __init__(self, program: Program) -> None:
        self._program = program
        fixed = [one for one in program.instructions if Slot(one.target) not in program.varying]
        shared = (list(program.takes), list(program.parameters))
        self._share = straight_line(fixed, program.constants, shared)

    def mark(self, dataset: Any) -> tuple[Any, ...]:
        """What items are made of now, but for what was written into arrays and lists: equal marks, equal items."""
        if not self._program.holds():
            raise Unvectorised("the code of the dataset has changed since it was read")
        containers, parameters = self._share(dataset, None)
        return (torch.get_default_dtype(), *map(_count, containers), *map(state_of, parameters))

    def contents(self, dataset: Any) -> list[Any]:
        """The same of what is in arrays and lists, as far as they can be read."""
        containers, _ = self._share(dataset, None)
        return [_content(one) for one in containers if type(one) is not torch.Tensor]


class _This:
    """Equal to itself, and to another about the same container, which stays as long: its address is nobody else's."""

    __slots__ = ("_one",)

    def __init__(self, one: Any) -> None:
        self._one = one

    def __eq__(self, other: object) -> bool:
        return type(other) is _This and other._one is self._one

    __hash__ = None  # type: ignore[assignment]


def _count(one: Any) -> tuple[Any, ...]:
    if type(one) is torch.Tensor:
        return _This(one), one.data_ptr(), one._version, one.dtype, one.shape, one.stride(), one.requires_grad
    if isinstance(one, np.ndarray):
        return _This(one), one.dtype, one.shape, one.strides
    return type(one), len(one)  # a worker's copy of the dataset has a list of its own: `contents` has what is in it


def state_of(value: Any) -> Any:
    """Something that is equal as long as a value is.

    Raises:
        Unvectorised: It may change and not be seen to.

    >>> state_of([1, 2.0]) == state_of([1, 2]), state_of([1, 2]) == state_of([1, 2])
    (False, True)
    """
    kind = type(value)
    if kind in _VALUES:
        return kind, value
    if kind in (tuple, list) and len(value) <= MOST_PARTS:
        return kind, tuple([state_of(one) for one in value])
    if kind is dict and len(value) <= MOST_PARTS:
        return kind, tuple([(key, state_of(one)) for key, one in value.items()])
    if kind is torch.Tensor and value.device.type == "cpu" and value.nbytes <= MOST_BYTES:
        if value.requires_grad:
            raise Unvectorised("items depend on a tensor with a history")
        copied = value.clone(memory_format=torch.contiguous_format)  # one seen as an array cannot be resized
        return kind, value.dtype, value.shape, copied.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic) and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return kind, value.dtype, value.shape, value.tobytes()
    known = vision.known(value)
    if known is not None:
        return kind, tuple([state_of(getattr(value, name)) for name in known.attributes])
    raise Unvectorised(f"items depend on a `{kind.__name__}`, which may change and not be seen to")


def _content(value: Any) -> Any:
    """What differs when a list or an array is another, or was changed."""
    if isinstance(value, np.ndarray):
        return id(value), value.shape, None if _is_of_bytes(value) else _checksum(value)
    found = None
    if len(value) <= MOST_ITEMS:
        with contextlib.suppress(Exception):  # objects of the script's own may raise anything, or have no hash
            found = _of_values(value)
    return type(value).__name__, len(value), found


def _is_of_bytes(array: Any) -> bool:
    """Whether nobody can write into an array: what it lies in are bytes of Python's."""
    while array is not None and not array.flags.writeable:
        array = array.base
        if isinstance(array, bytes):
            return True
        if not hasattr(array, "flags"):
            return False
    return False


def _of_values(value: Any) -> int:
    """A number that changes with what a container holds."""
    values = tuple(value.items() if isinstance(value, dict) else value)
    return zlib.crc32(pickle.dumps(values)) if _is_plain(values) else hash(values)  # which takes -1 for -2, 1 for 1.0


def _is_plain(value: Any) -> bool:
    """Whether it is a simple value, or a tuple or list of such, as paths with their labels are."""
    return type(value) in _SIMPLE or (type(value) in (tuple, list) and all(map(_is_plain, value)))


def _checksum(array: Any) -> int | None:
    """A number that changes with the bytes of an array; none where that is too large."""
    if array.dtype.hasobject or array.nbytes > MOST_READ_BYTES:
        return None
    return zlib.crc32(array if array.flags.c_contiguous else array.tobytes())
