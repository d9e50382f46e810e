"""What does a dataset hold that worker processes would not share with the script?

Workers work on a copy of the dataset, made when they start. Where the script changes the dataset between epochs, kept
workers would not see it; where it holds an open file, forked workers would move each other's position. In: a dataset.
Out: a fingerprint that changes with it, and what it holds open.
"""

from __future__ import annotations

import io
import itertools
import sys
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.of_loader import OfLoader

MAX_OBJECTS = 2000
"""Objects looked at; a dataset has a handful, beside its items."""

MAX_DEPTH = 5
MAX_ITEMS = 64
"""Items of one container looked at: lists of paths and labels are not gone through."""

MOST_BYTES = 256 * 2**20
"""Bytes of one array that are read (some 0.1 s). One that is larger, and may be written to, counts as changed each
time: its workers are started anew, as PyTorch does by default."""

OPEN_KINDS = ("h5py.", "sqlite3.", "lmdb.", "zipfile.ZipFile", "tarfile.TarFile", "cv2.VideoCapture", "netCDF4.")
"""Classes, by the beginning of their full name, that hold a file or a connection open."""

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_never_seen = itertools.count()
_OPAQUE = (torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, *_VALUES)


def fingerprint(dataset: Any, *, surely: bool = True) -> int:
    """A number that differs when the dataset's attributes were changed in between, as far as can be seen cheaply.

    Values of simple types count by value, arrays that may be written to by their bytes, tensors by identity, version
    and, on a CPU, bytes, containers by length and first items. `surely`: what is too large to read counts as changed.
    """
    return hash(tuple(_mark(value, surely) for value in _walk(dataset)))


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether the script has workers that stay from one pass to the next."""
    return bool(loader.persistent_workers and loader.num_workers)


class Copies:
    """The datasets of workers that the script keeps, which have them as they were when they began."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()

    def check(self, loader: DataLoader[Any]) -> None:
        """Workers begin, or what stands for them.

        Raises:
            RuntimeError: The dataset is not as it was when the first ones began.
        """
        mark = fingerprint(loader.dataset, surely=False)
        if self._marks.setdefault(loader, mark) != mark:
            raise RuntimeError("the dataset has changed since the workers began that the script keeps")


def held_open(dataset: Any) -> str | None:
    """The kind of an open file or connection that the dataset holds, or None."""
    for value in _walk(dataset):
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name.startswith(OPEN_KINDS):
            return name
        if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO) and not value.closed:
            return name
    return None


def _mark(value: Any, surely: bool) -> Any:
    if isinstance(value, _VALUES):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return id(value), value._version, _checksum(_array_of(value), surely)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return id(value), value.shape, _checksum(value, surely) if value.flags.writeable else None
    if isinstance(value, list | tuple | dict | set | frozenset):
        return type(value).__name__, len(value)
    return id(value)


def _array_of(tensor: torch.Tensor) -> Any:
    """The tensor's memory as an array; None where it lies elsewhere, is sparse, or of a type that NumPy has not."""
    try:
        return tensor.detach().numpy()
    except (RuntimeError, TypeError):
        return None


def _checksum(array: Any, surely: bool) -> int | None:
    """A number that changes with the bytes of an array; another one each time, or none, where that is too large."""
    if array is None or array.dtype.hasobject:
        return None
    if array.nbytes > MOST_BYTES:
        return next(_never_seen) if surely else None
    return zlib.adler32(array if array.flags.c_contiguous else array.tobytes())


def _walk(value: Any) -> Iterator[Any]:
    """The value and what it refers to, breadth first and bounded."""
    level, num, seen = [value], 0, set()
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for one in level:
            if not isinstance(one, _VALUES):
                if id(one) in seen:
                    continue
                seen.add(id(one))
            num += 1
            if num > MAX_OBJECTS:
                return
            yield one
            following += _parts(one)
        level = following


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value[:MAX_ITEMS])
    if isinstance(value, dict):
        return [part for pair in list(value.items())[:MAX_ITEMS] for part in pair] if len(value) <= MAX_ITEMS else []
    if isinstance(value, _OPAQUE):
        return []
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    return [part for part in attributes.values() if type(part) is not OfLoader]  # which is no part of the script's
