"""What does a dataset hold that worker processes would not share with the script?

Workers work on a copy of the dataset, made when they start, and of what the script's modules hold. What the script
changes there later they do not see; where it holds an open file, forked workers would move each other's position. In: a
dataset. Out: marks that change with it and with what its code reads, and what it holds open.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import pickle
import sys
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.seams.script_code import is_the_scripts

MAX_OBJECTS = 2000
"""Objects looked at; a dataset has a handful, beside its items."""

MAX_DEPTH = 8
MAX_ITEMS = 64
"""Items of one container looked at: lists of paths and labels are not gone through."""

MOST_BYTES = 256 * 2**20
"""Bytes of one array that are read in a close look (some 0.1 s)."""

FEW_BYTES = 64 * 2**10
"""Bytes of one array that are read in any look (some 0.02 ms)."""

MOST_ITEMS = 1_000_000
"""Items of one container that are gone through in a close look (some 0.1 s)."""

OPEN_KINDS = ("h5py.", "sqlite3.", "lmdb.", "zipfile.ZipFile", "tarfile.TarFile", "cv2.VideoCapture", "netCDF4.")
"""Classes, by the beginning of their full name, that hold a file or a connection open."""

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (torch.Tensor, types.ModuleType, *_VALUES)


def marks(*things: Any, closely: bool = True) -> list[Any]:
    """What differs when things were changed in between, or what their code reads, as far as can be seen cheaply.

    That is their attributes, those of the script's own classes, and the names of modules that the script's own
    functions use. Values of simple types count by value, tensors by identity and version, containers by length and
    first items, small arrays by their bytes; looked at `closely` also large arrays that may be written to, tensors on
    a CPU, and all of a container that holds nothing but simple values.
    """
    return [mark(value, closely=closely) for value in _walk(things)]


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether the script has workers that stay from one pass to the next."""
    return bool(loader.persistent_workers and loader.num_workers)


class Copies:
    """The datasets of workers that the script keeps, which have them as they were when they began."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[DataLoader[Any], list[Any]] = weakref.WeakKeyDictionary()

    def check(self, loader: DataLoader[Any]) -> None:
        """Workers begin, or what stands for them.

        Raises:
            RuntimeError: The dataset is not as it was when the first ones began.
        """
        found = marks(loader.dataset)
        if self._marks.setdefault(loader, found) != found:
            raise RuntimeError("the dataset has changed since the workers began that the script keeps")


def held_open(dataset: Any) -> str | None:
    """The kind of an open file or connection that the dataset holds, or None."""
    for value in _walk((dataset,)):
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name.startswith(OPEN_KINDS):
            return name
        if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO) and not value.closed:
            return name
    return None


def mark(value: Any, *, closely: bool) -> Any:
    """What differs when one thing is another, or was changed, as `marks` says."""
    if isinstance(value, _VALUES):
        return type(value).__name__, value
    if isinstance(value, functools._lru_cache_wrapper):
        return id(value), value.cache_info().misses
    if isinstance(value, torch.Tensor):
        array = None
        if closely:
            with contextlib.suppress(RuntimeError, TypeError):  # on a device, sparse, of a type that NumPy has not
                array = value.detach().numpy()
        return id(value), value._version, _checksum(array)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        is_read = not _is_of_bytes(value) if closely else value.flags.writeable and value.nbytes <= FEW_BYTES
        return id(value), value.shape, _checksum(value) if is_read else None
    if isinstance(value, list | tuple | dict | set | frozenset):
        found = None
        if closely and len(value) <= MOST_ITEMS:
            with contextlib.suppress(Exception):  # objects of the script's own may raise anything, or have no hash
                found = _of_values(value)
        return type(value).__name__, len(value), found
    return id(value)


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
    return type(value) in _VALUES or (type(value) in (tuple, list) and all(map(_is_plain, value)))


def _checksum(array: Any) -> int | None:
    """A number that changes with the bytes of an array; none where that is too large."""
    if array is None or array.dtype.hasobject or array.nbytes > MOST_BYTES:
        return None
    return zlib.crc32(array if array.flags.c_contiguous else array.tobytes())


def _walk(things: tuple[Any, ...]) -> Iterator[Any]:
    """The things and what they refer to, breadth first and bounded."""
    level, num, seen = [*things], 0, set()
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
    if isinstance(value, types.FunctionType):
        outside = read_outside(value).values() if is_the_scripts(value) else None
        return [] if outside is None else [*outside, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, type):
        names = [pair for kind in value.__mro__ if is_the_scripts(kind) for pair in vars(kind).items()]
        return [part for name, part in names if name[:2] != "__" or isinstance(part, types.FunctionType)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        slots = [
            name for kind in type(value).__mro__ if is_the_scripts(kind) for name in vars(kind).get("__slots__", ())
        ]
        return [getattr(value, name, None) for name in slots if isinstance(name, str)]
    return [*attributes.values(), type(value)]


def read_outside(function: types.FunctionType) -> dict[str, Any]:
    """What a function of the script's finds outside itself: names of its module and of the script's other modules."""
    (names, attributes), space = _names(function.__code__), function.__globals__
    found = {name: space[name] for name in names if name in space}
    modules = [one for one in found.values() if isinstance(one, types.ModuleType)]
    for module in modules:
        if is_the_scripts(module):
            inside = {name: vars(module)[name] for name in attributes if name in vars(module)}
            found |= {f"{module.__name__}.{name}": value for name, value in inside.items()}
            modules += [one for one in inside.values() if isinstance(one, types.ModuleType) and one not in modules]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return found | {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code finds in its module, and those that it finds in others."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    used = {one.argval for one in dis.get_instructions(code) if one.opname.endswith(("_GLOBAL", "_NAME"))}
    return frozenset(used.union(*(names for names, _ in inner))), frozenset(code.co_names).union(*(n for _, n in inner))
