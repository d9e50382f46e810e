"""Where are the tensors in what a model takes or returns? In tuples, mappings, dataclasses and plain objects.

`torch.utils._pytree` knows registered containers alone; a model may return an `OrderedDict` of its library's own, a
dataclass or a distribution. In: any value. Out: its tensors in a fixed order, or the value with its tensors replaced.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

MAX_DEPTH = 6
"""Levels that are looked through; what lies deeper is left alone."""

MAX_PARTS = 10_000
"""Longer containers are left alone as well: they hold text or numbers, and are too slow to look through."""

_OPAQUE = (
    *(nn.Module, torch.Generator, type, str, bytes, int, float, complex, types.ModuleType, types.FunctionType),
    *(types.MethodType, types.BuiltinFunctionType),
)


def tensors_of(value: Any, *, unique: bool = True) -> list[torch.Tensor]:
    """All tensors of a value in the order of its parts, each once, or as often as it occurs."""
    if not unique:
        return list(_tensors(value, 0))
    found: dict[int, torch.Tensor] = {}
    for tensor in _tensors(value, 0):
        found.setdefault(id(tensor), tensor)
    return list(found.values())


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < MAX_DEPTH:
        for _, part in parts_of(value):
            yield from _tensors(part, depth + 1)


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any, *, objects: bool = True, unique: bool = True) -> Any:
    """The value with each tensor replaced by `change` of it; what holds no changed tensor stays the same object.

    A tensor that occurs twice is changed once, or, with `unique` false, each time. With `objects` false only built-in
    containers, mappings and dataclasses are rebuilt, and other objects are passed as they are.
    """
    changed: dict[int, tuple[torch.Tensor, Any]] = {}

    def once(tensor: torch.Tensor) -> Any:
        if id(tensor) not in changed:
            changed[id(tensor)] = (tensor, change(tensor))
        return changed[id(tensor)][1]

    return _map(once if unique else change, value, 0, objects)


def _map(change: Callable[[torch.Tensor], Any], value: Any, depth: int, objects: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    is_container = isinstance(value, tuple | list | Mapping) or hasattr(type(value), "__dataclass_fields__")
    if depth >= MAX_DEPTH or not (objects or is_container):
        return value
    parts = list(parts_of(value))
    new = {key: _map(change, part, depth + 1, objects) for key, part in parts}
    if all(new[key] is part for key, part in parts):
        return value
    return _rebuilt(value, new)


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a container with their keys; nothing for what is no container."""
    if isinstance(value, tuple | list):
        yield from enumerate(value) if len(value) <= MAX_PARTS else ()
    elif isinstance(value, Mapping):
        yield from value.items() if len(value) <= MAX_PARTS else ()
    elif isinstance(value, _OPAQUE) or value is None:
        return
    elif hasattr(type(value), "__dataclass_fields__"):
        for name in type(value).__dataclass_fields__:
            if hasattr(value, name):
                yield name, getattr(value, name)
    elif type(value).__module__ != "builtins" and isinstance(getattr(value, "__dict__", None), dict):
        yield from vars(value).items()


def _rebuilt(value: Any, new: Mapping[Any, Any]) -> Any:
    if isinstance(value, tuple):
        items = list(new.values())
        if type(value) is tuple:
            return tuple(items)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        if type(value) is list:
            return list(new.values())
        copied = copy.copy(value)
        copied[:] = list(new.values())
        return copied
    if type(value) is dict:
        return dict(new)
    copied = copy.copy(value)
    if isinstance(value, Mapping):
        for key, part in new.items():
            copied[key] = part
    else:
        for name, part in new.items():
            object.__setattr__(copied, name, part)
    return copied


def digest(batch: Any) -> str:
    """A hash of every value in a batch: type, shape and bytes of tensors and arrays, pickles of the rest."""
    state = hashlib.blake2b(digest_size=16)
    _add(state, batch, 0)
    return state.hexdigest()


def _add(state: Any, value: Any, depth: int) -> None:
    state.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype} {tuple(value.shape)}".encode())
        dense = value.detach().cpu() if value.layout is torch.strided else value.detach().cpu().to_dense()
        state.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "__array_interface__"):
        state.update(f"{value.dtype} {value.shape}".encode())
        state.update(value.tobytes() if value.dtype.kind != "O" else pickle.dumps(value.tolist()))
    elif depth < MAX_DEPTH and (parts := list(parts_of(value))):
        for key, part in parts:
            state.update(repr(key).encode())
            _add(state, part, depth + 1)
    else:
        try:
            state.update(pickle.dumps(value))
        except Exception:  # noqa: BLE001  a user's object may refuse in any way
            return
