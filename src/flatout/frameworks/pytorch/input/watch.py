"""Did anything change that a dataset's items read or could change?

In: a dataset and how its items become a batch. Out: the name of the first thing that is no longer as it was. It is
asked at each batch, in the script's process and in those that make batches; there large arrays cannot be written to.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import operator
import os
import random
import types
import zlib
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.ahead.generators import state_of
from flatout.frameworks.pytorch.input.reach import (
    BYTES,
    CONTAINERS,
    GENERATORS,
    SIMPLE,
    UnknownError,
    attributes_of,
    held_by,
    is_plain,
    odd_ones,
    reached,
)

FEW_BYTES = 64 * 2**10
"""Of an array: read at each batch, some 0.02 ms. In a process that makes batches nobody can write into larger ones."""

MANY_BYTES = 4 * 2**20
"""Of an array of NumPy's: read at each batch in the script's process, some 0.4 ms; larger ones only when asked to."""

MOST_BYTES = 256 * 2**20
"""Of an array that is read when asked to, some 0.1 s."""


class Watch:
    """What is reached from here, as it is now.

    Raises:
        UnknownError: Nobody could say whether some of it changed.
    """

    def __init__(self, *things: Any) -> None:
        self.things = things
        try:
            with torch._C.DisableTorchFunctionSubclass():
                self._look()
        except UnknownError:
            raise
        except Exception as problem:
            raise UnknownError(f"it cannot be looked into: {type(problem).__name__}: {problem}") from problem

    def _look(self) -> None:
        found = reached(*self.things)
        self.generators: Sequence[Any] = [one for one, _ in found if isinstance(one, GENERATORS)]
        """The dataset's own, which may move: where they stand is not part of what is compared here."""
        for one in self.generators:
            state_of(one)
        shared = _shared_memory()
        for one, name in found:
            if _num_bytes(one) and any(begin <= _extent(one)[0] < end for begin, end in shared):
                raise UnknownError(f"`{name}` lies in memory that processes share")
        self._kept = [_Kept(one, name, MANY_BYTES) for one, name in found]
        self._large = [one for one, _ in found if MANY_BYTES < _num_bytes(one) <= MOST_BYTES]
        self._sums: list[int] = []
        self._edges: list[tuple[int, int, bytes]] = []
        self._around = _surroundings()

    def changed(self) -> str | None:
        """The name of the first thing that is not as it was, or None."""
        if self._around != (around := _surroundings()):
            return next(name for name in around if around[name] != self._around[name])
        for kept in self._kept:
            if (name := kept.changed()) is not None:
                return name
        if any(ctypes.string_at(start, num) != before for start, num, before in self._edges):
            return "an array"
        return None

    def sum_up(self) -> bool:
        """Read the large arrays: whether they are as they were the last time."""
        before, self._sums = self._sums, [zlib.crc32(_memory(one)) for one in self._large]
        return not before or before == self._sums

    def protect(self) -> None:
        """Whoever writes into a larger array from now on dies of it. For a process that makes batches."""
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        page = mmap.PAGESIZE
        self._kept = [_Kept(kept.one, kept.name, FEW_BYTES) for kept in self._kept]
        for one in [kept.one for kept in self._kept if _num_bytes(kept.one) > FEW_BYTES]:
            start, end = _extent(one)
            first, last = -(-start // page) * page, end // page * page
            protect(first, last - first, mmap.PROT_READ)
            edges = ((start, first - start), (last, end - last))
            self._edges += [(at, num, ctypes.string_at(at, num)) for at, num in edges]


class _Kept:
    """One thing, and what it held; arrays of at most so many bytes are read."""

    __slots__ = ("_before", "_is_plain", "_most_bytes", "name", "one")

    def __init__(self, one: Any, name: str, most_bytes: int) -> None:
        self.one, self.name, self._most_bytes = one, name, most_bytes
        self._is_plain = type(one) in (list, dict, tuple, set) and is_plain(one)
        self._before: Any = _copied(one) if self._is_plain else _held(one, most_bytes)

    def changed(self) -> str | None:
        one, before = self.one, self._before
        if self._is_plain:
            try:
                return None if before == one and [*before] == [*one] else self.name
            except Exception:  # noqa: BLE001  something of the script's own kind lies in there now
                return self.name
        now = _held(one, self._most_bytes)
        if len(before) != len(now):
            return self.name
        if all(map(operator.is_, before, now)):
            return None
        pairs = enumerate(zip(before, now, strict=True))
        other = next((at for at, (former, value) in pairs if not _equal(former, value)), None)
        if other is None:
            return None
        names = list(held_by(one) if isinstance(one, types.FunctionType) else attributes_of(one))
        owner = (
            "" if isinstance(one, types.FunctionType) else (one if isinstance(one, type) else type(one)).__name__ + "."
        )
        return f"{owner}{names[other]}" if other < len(names) else self.name


def _held(one: Any, most_bytes: int) -> list[Any]:
    """What an object holds now: its attributes, and what else belongs to its kind."""
    if isinstance(one, types.FunctionType):
        return [*held_by(one).values(), one.__code__]
    if isinstance(one, functools._lru_cache_wrapper):
        return [one.cache_info().misses]
    if isinstance(one, BYTES):
        return [bytes(one), *attributes_of(one).values()]
    found: list[Any] = list(attributes_of(one).values())
    if isinstance(one, random.Random):
        return [value for name, value in attributes_of(one).items() if name != "gauss_next"]  # of where it stands
    if isinstance(one, GENERATORS):
        bits = getattr(one, "bit_generator", getattr(one, "_bit_generator", one))
        return [*found, getattr(getattr(bits, "seed_seq", None), "n_children_spawned", None)]
    if isinstance(one, dict):
        return [*found, *one, *one.values()]
    if isinstance(one, CONTAINERS):
        return [*found, *one]
    if isinstance(one, torch.Tensor):
        return [*found, one._version, one.data_ptr(), one.shape, one.stride(), _few_bytes(one, most_bytes)]
    if isinstance(one, np.ndarray):
        if one.dtype.hasobject:
            return [*found, *one.ravel().tolist()]
        inside = one.tobytes() if one.nbytes <= most_bytes else _extent(one)[0]
        return [*found, one.shape, one.strides, one.dtype, inside]
    return found


def _copied(plain: Any) -> Any:
    """The same again, of what holds nothing but simple values and the like."""
    if type(plain) is dict:
        return {key: _copied(value) for key, value in plain.items()}
    if type(plain) not in (list, tuple, set) or not odd_ones(plain):
        return plain.copy() if type(plain) in (list, set) else plain
    return type(plain)(map(_copied, plain))


def _surroundings() -> dict[str, Any]:
    """What holds for all code of a process."""
    return {
        "os.environ": dict(os.environ),
        "the folder": _folder(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
    }


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return ""


def _shared_memory() -> list[tuple[int, int]]:
    """Where memory begins and ends that other processes may see written to."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            where, flags, *_ = line.split(maxsplit=2)
            if "w" in flags and "s" in flags:
                begin, end = (int(at, 16) for at in where.split("-"))
                found.append((begin, end))
    return found


def _equal(one: Any, other: Any) -> bool:
    """Whether two objects are the same, or the same simple value."""
    if one is other:
        return True
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and type(one) in SIMPLE and bool(one == other)


def _num_bytes(one: Any) -> int:
    if isinstance(one, torch.Tensor):
        return one.untyped_storage().nbytes()
    return one.nbytes if isinstance(one, np.ndarray) and not one.dtype.hasobject else 0


def _few_bytes(one: Any, most: int) -> bytes | None:
    return bytes(_memory(one)) if 0 < _num_bytes(one) <= most else None


def _extent(one: Any) -> tuple[int, int]:
    """The addresses where the memory of a tensor or an array begins and ends."""
    if isinstance(one, torch.Tensor):
        storage = one.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    start = one.__array_interface__["data"][0]
    reach = [(num - 1) * stride for num, stride in zip(one.shape, one.strides, strict=True)]
    return start + sum(n for n in reach if n < 0), start + sum(n for n in reach if n > 0) + one.itemsize


def _memory(one: Any) -> Any:
    start, end = _extent(one)
    return (ctypes.c_char * (end - start)).from_address(start)


def check_copy(begun: MutableMapping[DataLoader[Any], Watch], loader: DataLoader[Any]) -> None:
    """Workers begin that work on a copy of the dataset as it was when the first of them began.

    Raises:
        RuntimeError: It is not so any more, or nobody can say.
    """
    try:
        watch = begun.get(loader) or begun.setdefault(loader, Watch(loader.dataset))
    except UnknownError as problem:
        raise RuntimeError(str(problem)) from problem
    if (name := watch.changed()) is not None or not watch.sum_up():
        raise RuntimeError(f"`{name or 'an array'}` has changed since the workers began that the script keeps")
