"""What could a dataset's items read or change? All that its code reaches, where that is of kinds whose changes show.

In: a dataset and how its items become a batch. Out: the objects that can change, each with its name, or the first thing
of which nobody can say whether items change it. Installed libraries are taken at their word: their functions and
classes keep nothing from one item to the next, only their objects do.
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import decimal
import dis
import enum
import functools
import gc
import io
import itertools
import logging
import mmap
import operator
import os
import pathlib
import random
import re
import sys
import types
import uuid
import weakref
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.seams.script_code import is_the_scripts

MOST_LOOKED_AT = 200_000
"""Objects gone through one by one, some 0.3 s; simple values in containers are not counted."""

MOST_WATCHED = 5_000
"""Objects that are compared one by one at each batch, 20 to 50 ms."""

MOST_PLAIN = 1_000_000
"""Lists, dictionaries and the like within each other that hold simple values alone, and are compared as one."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
BYTES = (bytearray, array.array)
_PLAIN = frozenset({list, tuple, dict, set, frozenset})
_OF_CLASSES = {
    "__dict__", "__weakref__", "__doc__", "__annotations__", "__module__", "__qualname__", "__slots__", "__hash__",
    "__parameters__", "__orig_bases__", "__abstractmethods__", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "__static_attributes__", "__firstlineno__", "__annotate_func__", "__type_params__",
}  # fmt: skip
"""What Python itself keeps in classes."""

_UNREADABLE = {"globals", "eval", "exec", "__import__"}
"""What finds names that nobody can foresee."""

_Pair = collections.namedtuple("_Pair", "one")  # whose descriptor has no public name

SIMPLE = frozenset({
    bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), object, range, slice,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, uuid.UUID, re.Pattern,
    decimal.Decimal, pathlib.PosixPath, pathlib.PurePosixPath, types.CodeType, types.GenericAlias, types.UnionType,
    np.ufunc, type(np.mean), operator.itemgetter, operator.attrgetter, operator.methodcaller, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodWrapperType, logging.Logger, type(os.environ), type(_Pair.one),  # type: ignore[attr-defined]
})  # fmt: skip
"""Kinds that do not change, or whose changes are seen otherwise: what is logged, and the environment."""

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
    except Exception as problem:  # noqa: BLE001  classes of the script's own may raise anything when looked at
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
            raise TooManyError(f"`{name}` leads to more than {MOST_WATCHED:,} objects, too many to watch")
        plain = is_plain(one)
        if not plain:
            waiting += _parts(one, name)
        if not isinstance(one, tuple | frozenset) or attributes_of(one) or (plain and odd_ones(one)):
            found.append((one, name))
    return found


def is_simple(value: Any) -> bool:
    """Whether it never changes, or is an installed library's function, class or module."""
    kind = type(value)
    if kind in SIMPLE or any(value is one for one in _OF_THE_PROCESS) or kind.__module__.partition(".")[0] == "flatout":
        return True
    if issubclass(kind, np.generic | np.dtype):
        return not issubclass(kind, np.void)
    if issubclass(kind, io.IOBase):
        return bool(value.closed)
    if issubclass(kind, type | types.ModuleType):
        return not is_the_scripts(value)
    if issubclass(kind, enum.Enum):
        return not is_the_scripts(kind)
    if kind.__name__ == "cython_function_or_method":
        return True
    if kind is types.BuiltinFunctionType:
        return isinstance(value.__self__, types.ModuleType | types.NoneType | type)
    return False


def is_plain(value: Any) -> bool:
    """Whether it is a list, a dictionary or the like with nothing in it but such and simple values.

    >>> is_plain([{"name": "a", "boxes": [(1, 2)]}]), is_plain([{"name": object}, torch.ones(1)])
    (True, False)
    """
    if type(value) not in _PLAIN:
        return False
    waiting, num = [value], 0
    while waiting:
        one = waiting.pop()
        values = [*one, *one.values()] if type(one) is dict else one
        odd = set(map(type, values)) - SIMPLE
        num += 1
        if odd - _PLAIN or num > MOST_PLAIN:
            return False
        if (
            odd == {tuple}
            and set(map(type, itertools.chain.from_iterable(v for v in values if type(v) is tuple))) <= SIMPLE
        ):
            continue
        if odd:
            waiting += [part for part in values if type(part) in _PLAIN]
    return True


def attributes_of(one: Any) -> dict[str, Any]:
    """What an object or a class of the script's holds under a name.

    >>> attributes_of(pathlib.PurePath), attributes_of(types.SimpleNamespace(a=1))
    ({}, {'a': 1})
    """
    if isinstance(one, type):
        inside = vars(one).items() if is_the_scripts(one) else ()
        return {name: part for name, part in inside if name not in _OF_CLASSES and not name.startswith("_abc_")}
    if isinstance(one, types.ModuleType):
        return {name: part for name, part in vars(one).items() if not name.startswith("__")}
    attributes = getattr(one, "__dict__", None)
    found = dict(attributes) if isinstance(attributes, dict) else {}
    for name, part in _slots_of(type(one)):  # type: ignore[arg-type]  # a class has a hash
        with contextlib.suppress(AttributeError):  # not set
            found[name] = part.__get__(one)
    return found


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    own = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple(pair for inside in own for pair in inside.items() if isinstance(pair[1], types.MemberDescriptorType))


def held_by(function: types.FunctionType) -> dict[str, Any]:
    """What a function finds outside itself; of a library's, what was put into it."""
    found = read_outside(function) if is_the_scripts(function) else {}
    names = {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}
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
        if is_the_scripts(one) and _looks_up(one):
            raise UnknownError(f"`{one.__qualname__}` looks names up while it runs")
        return [(part, key) for key, part in held_by(one).items()]
    if isinstance(one, type):
        found = [(part, f"{one.__name__}.{key}") for key, part in attributes_of(one).items()]
        return [*found, *((base, base.__name__) for base in (*one.__mro__[1:], type(one)))]
    if isinstance(one, types.ModuleType):
        return [(part, f"{one.__name__}.{key}") for key, part in attributes_of(one).items()]
    if (wrapped := _wrapped(one)) is not None:
        return [(part, name) for part in wrapped]
    attributes = {key: part for key, part in attributes_of(one).items() if not isinstance(part, mmap.mmap)}
    found = [(part, f"{kind.__name__}.{key}") for key, part in attributes.items()]
    found.append((kind, kind.__name__))
    if isinstance(one, CONTAINERS):
        return [*found, *((part, name) for part in odd_ones(one))]
    if isinstance(one, torch.Tensor | np.ndarray):
        return [*found, *((part, name) for part in _beneath(one, name))]
    if not isinstance(one, GENERATORS + BYTES) and _holds_more(kind):
        raise UnknownError(f"`{name}` is a `{kind.__module__}.{kind.__qualname__}`")
    return found


def _beneath(one: torch.Tensor | np.ndarray[Any, Any], name: str) -> list[Any]:
    """What a tensor or an array has its numbers in, or objects in the place of numbers.

    Raises:
        UnknownError: That cannot be looked at.
    """
    if isinstance(one, torch.Tensor):
        if one.layout is not torch.strided or one.device.type != "cpu" or one.is_quantized:
            raise UnknownError(f"`{name}` is a tensor that is not plainly in this process's memory")
        return []
    objects = odd_ones(one.ravel().tolist()) if one.dtype.hasobject else []
    return [*objects, one.base] if isinstance(one.base, np.ndarray | torch.Tensor) else objects


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
    if isinstance(one, weakref.ref):
        return [one()]
    if isinstance(one, functools._lru_cache_wrapper) or type(one).__name__ == "_lru_list_elem":
        return gc.get_referents(one)  # what it has kept among them
    if isinstance(one, types.MappingProxyType):
        return [dict(one)]
    return None


def _holds_more(kind: type) -> bool:
    """Whether objects of a class hold something that is in no attribute of theirs, as those written in C do."""
    if issubclass(kind, str | bytes | int | float):
        return False
    word = object.__basicsize__ // 2
    num_words = 2 + len(_slots_of(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)  # type: ignore[arg-type]
    return kind.__basicsize__ > num_words * word or kind.__itemsize__ > 0


def read_outside(function: types.FunctionType) -> dict[str, Any]:
    """What a function of the script's finds outside itself: names of its module and of the script's other modules."""
    (names, attributes, imports), space = _names(function.__code__), function.__globals__
    found = {name: space[name] for name in names if name in space}
    found |= {name: sys.modules[name] for name in imports if name in sys.modules}
    modules = [one for one in found.values() if isinstance(one, types.ModuleType)]
    for module in modules:
        if is_the_scripts(module):
            inside = {name: vars(module)[name] for name in attributes if name in vars(module)}
            found |= {f"{module.__name__}.{name}": value for name, value in inside.items()}
            modules += [one for one in inside.values() if isinstance(one, types.ModuleType) and one not in modules]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return found | {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _looks_up(function: types.FunctionType) -> bool:
    """Whether a function finds names that nobody can foresee."""
    names, attributes, _ = _names(function.__code__)
    return bool(names & _UNREADABLE) or ("sys" in names and "modules" in attributes)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[frozenset[str], ...]:
    """The names that code finds in its module, those that it finds in others, and what it imports."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    found: tuple[set[str], ...] = set(), {*code.co_names}, set()
    for one in dis.get_instructions(code):
        if one.opname.endswith(("_GLOBAL", "_NAME")):
            found[2 * one.opname.startswith("IMPORT")].add(one.argval)
    return tuple(frozenset(own.union(*others)) for own, *others in zip(found, *inner, strict=True))
