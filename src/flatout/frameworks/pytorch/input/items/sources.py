"""What are items made of, and is it still what it was when they were kept?

An item follows from what is taken out of the dataset for it, and from what all items share. Both are looked at each
time, which costs less than computing the item: rows of arrays and lists by value, tensors by PyTorch's own count of
their changes, arrays that nobody can write to by what they are. In: a program, a dataset, indices. Out: a `Look`, to
be compared with a former one.
"""

from __future__ import annotations

import contextlib
import struct
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items import vision
from flatout.frameworks.pytorch.input.items.program import Instruction, Program, Slot, slots_of, straight_line
from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised

MOST_BYTES = 2**16
"""Of an array that all items share: it is compared with each batch."""

MOST_PARTS = 64

_VALUES = (
    *(bool, int, str, bytes, type(None), type(Ellipsis), slice, type, torch.dtype, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.dtype),
)


@dataclass(frozen=True, slots=True)
class Look:
    """What items are made of, at one moment.

    Attributes:
        mark: What they share. Equal marks, and equal rows, give equal items.
        rows: What is taken for each, as arrays or lists with a row for each index.
    """

    mark: tuple[Any, ...]
    rows: tuple[Any, ...]


class Sources:
    """What the items of one program are made of."""

    def __init__(self, program: Program) -> None:
        self._program = program
        fixed = [one for one in program.instructions if Slot(one.target) not in program.varying]
        shared = ([take.container for take in program.takes], list(program.parameters))
        self._share = straight_line(fixed, program.constants, shared)
        self._counted: tuple[bool, ...] | None = None
        """Of which containers PyTorch counts the changes, or which cannot change."""
        self._take: Any = None
        """Takes rows out of all others."""

    def look(self, dataset: Any, indices: Sequence[int]) -> Look:
        """What the items of these indices are made of now.

        Raises:
            Unvectorised: It cannot be told, or is not as it was when the program was read.
        """
        if not self._program.holds():
            raise Unvectorised("the code of the dataset has changed since it was read")
        index = Rows("int", list(indices))
        containers, parameters = self._share(dataset, index)
        counted = tuple([type(one) is torch.Tensor or _is_frozen(one) for one in containers])
        if counted != self._counted:
            self._compare_all_but(counted)
        mark = [_count(one) if on else _kind(one) for one, on in zip(containers, counted, strict=True)]
        taken = self._take(dataset, index)
        rows = tuple([_data(one) for one in taken])
        return Look((torch.get_default_dtype(), *mark, *map(_form, taken, rows), *map(state_of, parameters)), rows)

    def _compare_all_but(self, counted: tuple[bool, ...]) -> None:
        taken = [take.rows for take, on in zip(self._program.takes, counted, strict=True) if not on]
        needed = _needed(self._program.instructions, taken)
        self._take = straight_line(needed, self._program.constants, taken)
        self._counted = counted


def _needed(instructions: Sequence[Instruction], wanted: Sequence[Slot]) -> list[Instruction]:
    """The instructions that give these values, in order."""
    needed, found = set(wanted), []
    for one in reversed(instructions):
        if Slot(one.target) in needed:
            needed |= slots_of((one.operands, one.keywords))
            found.append(one)
    return found[::-1]


class _This:
    """Equal to itself, and to another about the same container, which stays as long: its address is nobody else's."""

    __slots__ = ("_one",)

    def __init__(self, one: Any) -> None:
        self._one = one

    def __eq__(self, other: object) -> bool:
        return type(other) is _This and other._one is self._one

    __hash__ = None  # type: ignore[assignment]


def _count(one: Any) -> tuple[Any, ...]:
    if type(one) is np.ndarray:
        return _This(one), one.dtype, one.shape, one.strides
    return _This(one), one.data_ptr(), one._version, one.dtype, one.shape, one.stride(), one.requires_grad


def _is_frozen(container: Any) -> bool:
    """Whether it is an array whose numbers lie in a `bytes` object, as `np.frombuffer(file.read())` gives it."""
    while type(container) is np.ndarray:
        if container.flags.writeable:
            return False
        container = container.base
    return type(container) is bytes


def _form(taken: Rows, rows: Any) -> Any:
    if isinstance(taken.data, torch.Tensor):
        return taken.data.dtype, taken.data.shape[1:]
    return (rows.dtype, rows.shape[1:]) if isinstance(rows, np.ndarray) else type(rows[0])


def _kind(container: Any) -> Any:
    return container.dtype if type(container) is torch.Tensor else type(container)


def _data(rows: Any) -> Any:
    if type(rows) is not Rows:
        raise Unvectorised("what is taken is the same for all")
    if isinstance(rows.data, torch.Tensor):
        return rows.data.contiguous().view(len(rows.data), -1).view(torch.uint8).numpy()
    if rows.kind == "float":
        return np.array(rows.data, np.float64)  # its bits are compared: 0.0 is not -0.0, and NaN is NaN
    if rows.kind == "int":
        with contextlib.suppress(OverflowError):
            return np.array(rows.data, np.int64)
    return rows.data


def state_of(value: Any) -> Any:
    """Something that is equal as long as a value is.

    Raises:
        Unvectorised: It may change and not be seen to.

    >>> state_of([1, 2.0]) == state_of([1, 2]), state_of([1, 2]) == state_of([1, 2])
    (False, True)
    """
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
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
        if vision.is_touched(value):
            raise Unvectorised("a transform that was changed since it was read")
        return kind, vision.code_of(kind), tuple([state_of(getattr(value, name)) for name in known.attributes])
    raise Unvectorised(f"items depend on a `{kind.__name__}`, which may change and not be seen to")
