"""What can a model's own code write outside of it, and has a call done so?

In: a module. Out: names of variables (globals, closures, attributes of classes) that a call has changed. What a rank
writes there is that of its part, and a call that is computed both ways writes more than once.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.protocol import Dividing
from flatout.frameworks.pytorch.parallel.refusal import ChangesOutside, NotDivided

_VALUES = (bool, int, float, complex, str, bytes)
_NEVER = (types.ModuleType, types.BuiltinFunctionType, torch.nn.Module, torch.optim.Optimizer,
          torch.Generator, random.Random)  # fmt: skip
_FOREIGN = {"torch", "numpy", "flatout", "builtins", *sys.stdlib_module_names}
"""What is written by code of these is no state of a model."""

MOST_ELEMENTS = {2: 1000, 1: 30}
"""Of larger containers, at the top and within one, elements are only compared by identity."""


MOST_BYTES = 64 * 2**10
"""Larger arrays are compared by identity alone."""


class _Fields(dict[str, Any]):
    """The attributes of an object or a class."""


class OutsideState:
    """What a module's code can write outside of the module.

    Args:
        module: A model; its code is that of all classes of its modules that are not PyTorch's.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        walk = _Walk()
        for kind in {one for part in module.modules() for one in type(part).__mro__ if not _is_foreign(one.__module__)}:
            walk.places[id(kind), ""] = kind.__qualname__.rpartition(".")[2], partial(_itself, kind)
            walk.follow(*vars(kind).values())
        for part in module.modules():
            walk.follow(*vars(part).values())
        self._places = list(walk.places.values())

    def seen(self) -> list[Any]:
        """A copy of what is there; it keeps what it holds alive, so that nothing new is taken for it."""
        return [copied_safely(value()) for _, value in self._places]

    def changed(self, before: list[Any]) -> list[str]:
        """Names of variables that are not what they were.

        A dict may have new keys, as one that keeps masks does, and what was None may be there, but nothing that is to
        be trained.
        """
        pairs = zip(self._places, before, self.seen(), strict=True)
        return sorted({_named(place[0], *pair) for place, *pair in pairs if not is_same(*pair)})


def refused(division: Dividing, name: str) -> ChangesOutside:
    """That calls which change a variable outside of their module cannot be divided."""
    cause = f"it changes `{name}`, a variable outside of it: what a rank puts there is that of its part"
    problem = division.refused(cause)
    return ChangesOutside(problem.error, cause=problem.cause, hint=problem.hint)


@contextmanager
def named_as_cause(division: Dividing) -> Iterator[None]:
    """What is refused within, where a trial call has changed a variable outside of the module, is refused for that."""
    outside = OutsideState(division.module())
    before = outside.seen()
    try:
        yield
    except NotDivided as problem:
        if changed := outside.changed(before):
            raise refused(division, changed[0]) from problem
        raise


class _Walk:
    """Finds the variables that functions name, and those of the functions among them."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], tuple[str, Callable[[], Any]]] = {}
        """Each variable's name, and how its value is found, by what holds it."""
        self._visited: set[Any] = set()

    def follow(self, *members: Any) -> None:
        """Go through functions, and what stands for one."""
        for function in (one for member in members for one in _functions(member)):
            if function not in self._visited:
                self._visited.add(function)
                self._through(function)

    def _through(self, function: types.FunctionType) -> None:
        space, names = function.__globals__, set(_names(function.__code__))
        cells = list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if _is_foreign(space.get("__name__")):  # a decorator, at most
            for _, cell in cells:
                self.follow(_content(cell))
            return
        for name in names & space.keys() | set(_stored(function.__code__)):
            self._variable(space, name, partial(space.get, name), names)
        for name, cell in cells:
            self._variable(cell, name, partial(_content, cell), names)

    def _variable(self, holder: object, name: str, content: Callable[[], Any], names: set[str]) -> None:
        """Take a variable in, and what of it is named as an attribute."""
        self.places[id(holder), name] = name, content
        value = content()
        self.follow(value)
        if _is(value, types.ModuleType):
            space = vars(value)
            if not _is_foreign(space.get("__name__")):
                for inner in names & space.keys():
                    if not isinstance(space[inner], types.ModuleType):
                        self._variable(space, inner, partial(space.get, inner), names - {inner})
            return
        for kind in (value if _is(value, type) else type(value)).__mro__:
            if not _is_foreign(kind.__module__) and not issubclass(kind, torch.nn.Module):
                for inner in (names | {"__call__"}) & vars(kind).keys():
                    self.follow(vars(kind)[inner])


def _functions(member: Any) -> Iterator[types.FunctionType]:
    if _is(member, types.FunctionType):
        yield member
    elif _is(member, property):
        for one in (member.fget, member.fset):
            yield from _functions(one)
    elif _is(member, staticmethod, classmethod, types.MethodType):
        yield from _functions(member.__func__)
    elif _is(member, functools.partial, functools.partialmethod, functools.cached_property):
        yield from _functions(member.func)


def _is(value: object, *kinds: type) -> bool:
    """`isinstance` for objects that may raise whatever they are asked for."""
    return issubclass(type(value), kinds)


def _itself(value: Any) -> Any:
    return value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    for one in _codes(code):
        yield from one.co_names


def _stored(code: types.CodeType) -> Iterator[str]:
    """The names that are declared `global` and written: they need not be there yet."""
    for one in _codes(code):
        if dis.opmap["STORE_GLOBAL"] in one.co_code:
            yield from (each.argval for each in dis.get_instructions(one) if each.opname == "STORE_GLOBAL")


def _is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


def copied_safely(value: Any) -> Any:
    """What `is_same` needs of a value."""
    try:
        return _copied(value)
    except Exception:  # noqa: BLE001  an object may raise whatever it is asked for
        return value


def _copied(value: Any, depth: int = 2) -> Any:
    """What a comparison needs: values, tensors with their version, what containers and plain objects hold."""
    if isinstance(value, torch.Tensor):
        return value, value._version
    if _is_small_array(value):
        return value, value.tobytes()  # it knows no version
    if isinstance(value, partial):
        return _copied([*value.args, *value.keywords.values()], depth)
    if isinstance(value, types.MethodType):
        return _copied(value.__self__, depth)
    if depth and isinstance(value, dict | list | set | deque):
        copied = partial(_copied, depth=depth - 1) if len(value) <= MOST_ELEMENTS[depth] else _itself
        if isinstance(value, dict):
            return {name: copied(one) for name, one in value.items()}
        return [copied(one) for one in value]
    if depth < 2 or isinstance(value, (*_VALUES, *_NEVER)) or _is_foreign_object(value):
        return value
    fields = vars(value) if hasattr(value, "__dict__") else None
    if not isinstance(fields, Mapping):
        return value
    kept = ((name, one) for name, one in fields.items() if not isinstance(value, type) or _is_data(one))
    return _Fields((name, _copied(one, depth - 1)) for name, one in kept)


def _is_small_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return is_array and value.nbytes <= MOST_BYTES and not value.dtype.hasobject


def _is_data(value: Any) -> bool:
    """Whether an attribute of a class is neither a method nor anything else that binds."""
    return not hasattr(type(value), "__get__") and not isinstance(value, type)


def _is_foreign_object(value: Any) -> bool:
    """Whether an object is PyTorch's, or a function or class of others."""
    if isinstance(value, type | types.FunctionType):
        return _is_foreign(value.__module__)
    return type(value).__module__.partition(".")[0] == "torch"


def is_same(before: Any, after: Any) -> bool:
    """Whether a copy is another one, or has come of it: there may be more in a dict, and something where None was."""
    if before is after:
        return True
    if before is None:
        return not _is_trained(after)
    if isinstance(before, _VALUES) and isinstance(after, _VALUES):
        return bool(before == after)
    if isinstance(before, dict) and isinstance(after, dict):
        return not _differing(before, after)
    if isinstance(before, list | tuple) and type(before) is type(after):
        return len(before) == len(after) and all(map(is_same, before, after))
    return False


def _differing(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    """Keys that are gone or have another value, and new ones whose value is to be trained."""
    found = [name for name, value in before.items() if name not in after or not is_same(value, after[name])]
    return found + [name for name, value in after.items() if name not in before and _is_trained(value)]


def _is_trained(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_is_trained, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_trained, value))


def _named(name: str, before: Any, after: Any) -> str:
    """A variable's name, with that of the attribute that has changed."""
    if isinstance(before, _Fields) and isinstance(after, _Fields):
        return f"{name}.{_differing(before, after)[0]}"
    return name
