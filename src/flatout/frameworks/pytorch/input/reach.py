"""What could a dataset's items read or change? All that its code reaches, where that is of kinds whose changes show.

In: a dataset and how its items become a batch. Out: the objects that can change, each with its name, or the first thing
of which nobody can say whether items change it. Installed libraries are taken at their word: their functions and
classes keep nothing from one item to the next, only their objects do.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import dis
import enum
import functools
import io
import itertools
import logging
import operator
import os
import pathlib
import random
import re
import types
import uuid
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.seams.script_code import is_the_scripts

MOST_LOOKED_AT = 200_000
"""Objects gone through one by one, some 0.3 s; simple values in containers are not counted."""

MOST_WATCHED = 5_000
"""Objects that are compared at each batch, some 10 ms."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)

SIMPLE = frozenset({
    bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), object, range, slice,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, re.Pattern,
    pathlib.PosixPath, pathlib.PurePosixPath, types.CodeType, types.GenericAlias, types.UnionType, np.ufunc,
    operator.itemgetter, operator.attrgetter, operator.methodcaller, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, types.WrapperDescriptorType, types.MethodDescriptorType, types.ModuleType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType,
    logging.Logger, type(os.environ),
})  # fmt: skip
"""Kinds that do not change, or whose changes are seen otherwise: what is logged, the environment, names of modules."""

_OF_THE_PROCESS = (torch.default_generator, random._inst, np.random.mtrand._rand)  # type: ignore[attr-defined]


class UnknownError(Exception):
    """Something is reached of which nobody can say whether items change it."""


class TooManyError(UnknownError):
    """It would take too long."""


def held_apart(dataset: Any) -> str | None:
    """What a dataset holds that a process of its own would not have as it is, or would move; None where nothing."""
    try:
        reached(dataset)
    except TooManyError:
        return None
    except UnknownError as problem:
        return str(problem)
    return None


def reached(*things: Any) -> list[tuple[Any, str]]:
    """All that can change and is reached from here, with its name.

    Raises:
        UnknownError: There is something whose changes nobody sees, or too much to look at.
    """
    waiting = [(one, type(one).__name__) for one in things]
    found: list[tuple[Any, str]] = []
    seen: dict[int, Any] = {}  # whatever lies in there keeps its address
    while waiting:
        one, name = waiting.pop()
        if id(one) in seen or is_simple(one):
            continue
        seen[id(one)] = one
        if len(seen) > MOST_LOOKED_AT or len(found) > MOST_WATCHED:
            raise TooManyError("it holds more objects than can be watched")
        waiting += _parts(one, name)
        if not isinstance(one, tuple | frozenset) or attributes_of(one):
            found.append((one, name))
    return found


def is_simple(value: Any) -> bool:
    """Whether it never changes, or is an installed library's function or class."""
    kind = type(value)
    if (
        kind in SIMPLE
        or issubclass(kind, np.generic | np.dtype | enum.Enum)
        or any(value is one for one in _OF_THE_PROCESS)
    ):
        return True
    if issubclass(kind, io.IOBase):
        return bool(value.closed)
    if issubclass(kind, type):
        return not is_the_scripts(value)
    if kind is types.BuiltinFunctionType:
        return isinstance(value.__self__, types.ModuleType | types.NoneType | type)
    return False


def attributes_of(one: Any) -> dict[str, Any]:
    """What an object or a class of the script's holds under a name.

    >>> attributes_of(pathlib.PurePath), attributes_of(types.SimpleNamespace(a=1))
    ({}, {'a': 1})
    """
    if isinstance(one, type):
        inside = vars(one).items() if is_the_scripts(one) else ()
        code = (types.FunctionType, staticmethod, classmethod, property)
        return {name: part for name, part in inside if isinstance(part, code) or not name.startswith(("__", "_abc_"))}
    attributes = getattr(one, "__dict__", None)
    found = dict(attributes) if isinstance(attributes, dict) else {}
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if isinstance(vars(kind).get(name), types.MemberDescriptorType) and hasattr(one, name):
                found[name] = getattr(one, name)
    return found


def held_by(function: types.FunctionType) -> dict[str, Any]:
    """What a function finds outside itself; of a library's, what was put into it."""
    names = read_outside(function) if is_the_scripts(function) else {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    names |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    kept = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__, **vars(function)}
    return {**names, **{f"{function.__name__}'s {name}": value for name, value in kept.items() if value}}


def odd_ones(container: Any) -> list[Any]:
    """What a container holds but simple values, and tuples and lists of nothing else."""
    values = [*container, *container.values()] if isinstance(container, dict) else container
    kinds = set(map(type, values))
    if kinds <= SIMPLE:
        return []
    if kinds == {tuple} and set(map(type, itertools.chain.from_iterable(values))) <= SIMPLE:
        return []
    return [value for value in values if type(value) not in SIMPLE]


def _parts(one: Any, name: str) -> list[tuple[Any, str]]:
    """What it leads to.

    Raises:
        UnknownError: It is of a kind that may hold more.
    """
    kind = type(one)
    if isinstance(one, types.FunctionType):
        return [(part, key) for key, part in held_by(one).items()]
    if isinstance(one, type):
        found = [(part, f"{one.__name__}.{key}") for key, part in attributes_of(one).items()]
        return [*found, *((base, base.__name__) for base in one.__mro__[1:])]
    if (wrapped := _wrapped(one)) is not None:
        return [(part, name) for part in wrapped]
    found = [(part, f"{kind.__name__}.{key}") for key, part in attributes_of(one).items()]
    found.append((kind, kind.__name__))
    if isinstance(one, CONTAINERS):
        return [*found, *((part, name) for part in odd_ones(one))]
    if isinstance(one, torch.Tensor):
        if one.layout is not torch.strided or one.device.type != "cpu" or one.is_quantized:
            raise UnknownError(f"`{name}` is a tensor that is not plainly in this process's memory")
        return found
    if isinstance(one, np.ndarray):
        if one.dtype.hasobject:
            found += [(part, name) for part in odd_ones(one.ravel().tolist())]
        return [*found, (one.base, name)] if isinstance(one.base, np.ndarray | torch.Tensor) else found
    if not isinstance(one, GENERATORS) and _holds_more(kind):
        raise UnknownError(f"`{name}` is a `{kind.__module__}.{kind.__qualname__}`")
    return found


def _wrapped(one: Any) -> list[Any] | None:
    """What something that is called instead of it stands for; None where it does not."""
    if isinstance(one, types.MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, types.BuiltinFunctionType):
        return [one.__self__]
    if isinstance(one, staticmethod | classmethod):
        return [one.__func__]
    if isinstance(one, property):
        return [one.fget, one.fset]
    if isinstance(one, functools.cached_property):
        return [one.func]
    if isinstance(one, functools.partial):
        return [one.func, one.args, one.keywords, vars(one)]
    if isinstance(one, functools._lru_cache_wrapper):
        return [one.__wrapped__]
    if isinstance(one, types.MappingProxyType):
        return [dict(one)]
    return None


def _holds_more(kind: type) -> bool:
    """Whether objects of a class hold something that is in no attribute of theirs, as those written in C do."""
    slots = [
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, part in vars(base).items()
        if isinstance(part, types.MemberDescriptorType)
    ]
    word = object.__basicsize__ // 2
    num_words = 2 + len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > num_words * word or kind.__itemsize__ > 0


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
