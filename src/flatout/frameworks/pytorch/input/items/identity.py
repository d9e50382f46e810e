"""What do the items of a dataset follow from, said so that another process can tell whether it is the same?

The program that was read and the values that go into it, the code that it was read from, the bytes of the tensors and
arrays that items are taken of, and the versions of what computes. In: a program and its dataset. Out: an `Identity`:
a digest for each of these.
"""

from __future__ import annotations

import hashlib
import platform
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flatout
from flatout.frameworks.pytorch.input.items.flushing import flushes_to_zero
from flatout.frameworks.pytorch.input.items.program import Program, Slot
from flatout.frameworks.pytorch.input.items.rows import Unvectorised

MOST_HASHED_BYTES = 2**30
"""So much of what items are taken of is hashed at most when a store is opened, which takes a second or two; of what is
larger, the rows are compared."""

MOST_ELEMENTS = 2**23
"""Elements of a list that are hashed; of a longer one, the rows are compared."""

PIECE_BYTES = 2**24
"""Hashed together, so that what does not lie densely is copied piece by piece."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What items follow from.

    Attributes:
        marks: A digest by kind: `versions`, `code`, `parameters`, `data`.
        compared: Numbers of the program's takes whose containers were not hashed: their rows must be compared.
        made_by: The versions, for people.
        tensors: Those that were hashed, each with its digest.
    """

    marks: dict[str, str]
    compared: frozenset[int]
    made_by: str
    tensors: tuple[tuple[torch.Tensor, str], ...] = ()

    def still_holds(self) -> bool:
        """Whether the tensors have the bytes that they had, also by ways that PyTorch does not count."""
        return all(hashed(tensor) == known for tensor, known in self.tensors)


def identify(program: Program, dataset: Any, containers: Sequence[Any], state: Any, num_items: int) -> Identity:
    """The identity of a dataset's items.

    Args:
        program: How an index becomes an item.
        dataset: The dataset.
        containers: What the program's takes take from.
        state: The state of its parameters, see `sources.state_of`.
        num_items: How many there are.

    Raises:
        Unvectorised: It cannot be told.
    """
    compared = frozenset(_too_large(containers))
    data = [_data(one, number in compared) for number, one in enumerate(containers)]
    shared = (_class_of(dataset), num_items, _structure(program), state, torch.get_default_dtype(), flushes_to_zero())
    return Identity(
        marks={
            "versions": digest(versions(program)),
            "code": digest([_told(name, value) for name, value in program.read_from]),
            "parameters": digest(shared),
            "data": digest(data),
        },
        compared=compared,
        made_by=", ".join(f"{name} {version}" for name, version in versions(program)[:4]),
        tensors=tuple(
            (one, found[-1])
            for number, (one, found) in enumerate(zip(containers, data, strict=True))
            if type(one) is torch.Tensor and number not in compared
        ),
    )


# -- values ---------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """A value as 32 hexadecimal digits, the same in every process.

    Raises:
        Unvectorised: It holds something whose value cannot be told.

    >>> digest([1, 2.0]) == digest([1, 2]), digest((0.0,)) == digest((-0.0,)), digest("a") == digest(b"a")
    (False, False, False)
    """
    found = hashlib.blake2b(digest_size=16)
    for piece in _written(value):
        found.update(piece)
    return found.hexdigest()


def _written(value: Any) -> Iterator[bytes]:
    kind = type(value)
    if kind in (tuple, list, torch.Size, set, frozenset):
        yield f"{kind.__name__} {len(value)}:".encode()
        pieces = [b"".join(_written(one)) for one in value]
        yield from sorted(pieces) if kind in (set, frozenset) else pieces
    elif kind is dict:
        yield f"dict {len(value)}:".encode()
        for key, one in value.items():
            yield from _written(key)
            yield from _written(one)
    else:
        text = _simple(value)
        yield f"{kind.__name__} {len(text)}:".encode()
        yield text


def _simple(value: Any) -> bytes:
    writes = _WRITES.get(type(value))
    if writes is not None:
        return writes(value)
    if isinstance(value, type):
        return _name_of(value).encode()
    if isinstance(value, np.dtype):
        return repr(value.descr).encode()
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return value.dtype.str.encode() + value.tobytes()
    raise Unvectorised(f"items depend on a `{type(value).__name__}`, whose value cannot be told in another process")


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _of_builtin(value: types.BuiltinFunctionType) -> bytes:
    owner = value.__self__
    if owner is not None and not isinstance(owner, types.ModuleType | type):
        raise Unvectorised("items depend on a method of an object")
    return f"{getattr(owner, '__name__', '')}.{value.__qualname__}".encode()


def _of_function(function: types.FunctionType) -> bytes:
    if function.__closure__:
        raise Unvectorised("items depend on a function within a function")
    return digest((_name_of(function), _code(function.__code__), *_defaults(function))).encode()


_WRITES: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    type(Ellipsis): lambda value: b"",
    bool: lambda value: b"1" if value else b"0",
    int: lambda value: hex(value).encode(),
    float: lambda value: struct.pack("d", value),
    complex: lambda value: struct.pack("dd", value.real, value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: lambda value: value,
    slice: lambda value: digest((value.start, value.stop, value.step)).encode(),
    range: lambda value: repr(value).encode(),
    torch.dtype: lambda value: str(value).encode(),
    Slot: lambda value: str(value.number).encode(),
    types.ModuleType: lambda value: value.__name__.encode(),
    types.CodeType: lambda value: digest(_code(value)).encode(),
    types.FunctionType: _of_function,
    types.BuiltinFunctionType: _of_builtin,
}


# -- the code and the program ---------------------------------------------------------------------------------------


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """What a function runs; not where it stands, so that lines may be added above it."""
    return (
        *(code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_consts),
        code.co_exceptiontable,
    )


def _defaults(function: types.FunctionType) -> tuple[Any, Any]:
    named = function.__kwdefaults__ or {}
    return [_loosely(one) for one in function.__defaults__ or ()], {key: _loosely(one) for key, one in named.items()}


def _loosely(value: Any) -> Any:
    """The value where it can be told, else what it is: the program says what of it goes into items."""
    try:
        return digest(value)
    except Unvectorised:
        return _name_of(type(value))


def _told(name: str, value: Any) -> Any:
    """A name that the code uses, and what was found there."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, types.FunctionType):
        return name, _name_of(value), _code(value.__code__), _defaults(value)
    return name, _loosely(value)


def _structure(program: Program) -> list[Any]:
    """The operations one after another; what lies in slots is told as a parameter where an item depends on it."""
    found: list[Any] = [
        (one.target, one.name, one.operands, one.keywords, Slot(one.target) in program.varying)
        for one in program.instructions
    ]
    return [*found, program.item, [(take.container, take.rows) for take in program.takes], program.parameters]


def _class_of(dataset: Any) -> str:
    return _name_of(type(dataset))


def versions(program: Program) -> list[tuple[str, str]]:
    """What computes items here; of torchvision and Pillow only where the program uses them."""
    used = {part for one in program.instructions for part in (one.name.partition(".")[0],)}
    packages = {"torchvision": "torchvision", "PIL": "PIL", "Image": "PIL"}
    others = sorted({package for name, package in packages.items() if name in used})
    return [
        ("flatout", flatout.__version__),
        ("PyTorch", str(torch.__version__)),
        ("NumPy", np.__version__),
        ("Python", platform.python_version()),
        ("own", _own_code()),
        ("machine", f"{platform.machine()} {sys.byteorder}"),
        *((name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in others),
    ]


@cache
def _own_code() -> str:
    """What computes items, of flatout's own: a checkout may change without another version."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


# -- data -----------------------------------------------------------------------------------------------------------


def _too_large(containers: Iterable[Any]) -> Iterator[int]:
    """Numbers of those that are not hashed."""
    left_bytes = MOST_HASHED_BYTES
    for number, one in enumerate(containers):
        if isinstance(one, torch.Tensor | np.ndarray):
            num_bytes = one.nbytes if type(one) is not np.memmap else left_bytes + 1
            if num_bytes > left_bytes:
                yield number
            else:
                left_bytes -= num_bytes
        elif isinstance(one, list | tuple) and len(one) > MOST_ELEMENTS:
            yield number


def _data(container: Any, compared: bool) -> Any:
    kind = type(container)
    if kind is torch.Tensor:
        return "tensor", container.dtype, container.shape, "" if compared else hashed(container)
    if kind in (np.ndarray, np.memmap):
        return "array", container.dtype, container.shape, "" if compared else hashed(container)
    if kind in (list, tuple):
        return kind, len(container), "" if compared else _elements(container)
    if kind is range:
        return container
    raise Unvectorised(f"items are taken of a `{kind.__name__}`")


def _elements(container: Sequence[Any]) -> str:
    """A list by value; where it holds anything else than simple values, its rows are all there is to compare."""
    simple = (int, float, str, bool)
    if any(type(one) not in simple for one in container):
        return ""
    return hashlib.blake2b(repr(container).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def hashed(values: Any) -> str:
    """A digest of the bytes of a tensor or an array."""
    found = hashlib.blake2b(digest_size=16)
    rows = max(1, PIECE_BYTES // max(1, values[:1].nbytes)) if values.ndim else 1
    for first in range(0, len(values) if values.ndim else 1, rows):
        piece = values[first : first + rows] if values.ndim else values
        if isinstance(piece, torch.Tensor):  # a copy, for a tensor that was seen as an array cannot be resized
            found.update(
                piece.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().data
            )
        else:
            found.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
