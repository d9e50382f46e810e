"""What can a model's own code write outside of it, and has a call done so?

In: a module. Out: names of variables (globals, closures, attributes of classes) that a call has changed. What a rank
writes there is that of its part, and a call that is computed both ways writes more than once.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.call_signature import SIMPLE, Fields, copied
from flatout.frameworks.pytorch.parallel.protocol import Dividing
from flatout.frameworks.pytorch.parallel.refusal import ChangesOutside

_FOREIGN = {"torch", "numpy", "flatout", "builtins", *sys.stdlib_module_names}
"""What is written by code of these is no state of a model."""

_WRAPPERS = {
    staticmethod: "__func__", classmethod: "__func__", types.MethodType: "__func__", property: "fget",
    partial: "func", functools.cached_property: "func",
}  # fmt: skip
"""What stands for a function, and where it has that."""

MOST_BYTES = 64 * 2**10
"""Larger arrays are compared by identity alone."""


class OutsideState:
    """The variables that the functions of a module's classes name, those that are not PyTorch's."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: dict[tuple[int, str], tuple[str, Callable[[], Any]]] = {}
        self._visited: set[types.FunctionType] = set()
        kinds = {kind for part in module.modules() for kind in type(part).__mro__ if not _is_foreign(kind.__module__)}
        for kind in kinds:
            self._places[id(kind), ""] = kind.__qualname__.rpartition(".")[2], partial(_itself, kind)
        for holder in (*kinds, *module.modules()):
            for member in vars(holder).values():
                self._follow(member)

    def seen(self) -> list[Any]:
        """A copy of what is there; it keeps what it holds alive, so that nothing new is taken for it."""
        return [copied_safely(value()) for _, value in self._places.values()]

    def changed(self, before: list[Any]) -> list[str]:
        """Names of variables that are not what they were; a dict may have new keys, and something be where None was."""
        pairs = zip(self._places.values(), before, self.seen(), strict=True)
        return sorted({_named(place[0], *pair) for place, *pair in pairs if not is_same(*pair)})

    def _follow(self, member: Any) -> None:
        """Take in what a function names, and what the functions among that name."""
        while type(member) in _WRAPPERS:
            member = getattr(member, _WRAPPERS[type(member)])
        if type(member) is not types.FunctionType or member in self._visited:
            return
        self._visited.add(member)
        space, names = member.__globals__, set(_names(member.__code__))
        cells = zip(member.__code__.co_freevars, member.__closure__ or (), strict=True)
        is_foreign = _is_foreign(space.get("__name__"))  # a decorator, at most
        for name, cell in cells:
            if is_foreign:
                self._follow(_content(cell))
            else:
                self._variable(cell, name, partial(_content, cell), names)
        for name in () if is_foreign else names:  # also what is not there yet
            self._variable(space, name, partial(space.get, name), names)

    def _variable(self, holder: object, name: str, content: Callable[[], Any], names: set[str]) -> None:
        """Take a variable in, and what of a file of the user's is named."""
        self._places[id(holder), name] = name, content
        value = content()
        self._follow(value)
        for kind in (value if issubclass(type(value), type) else type(value)).__mro__:
            if not _is_foreign(kind.__module__) and not issubclass(kind, torch.nn.Module):
                for inner in (names | {"__call__"}) & vars(kind).keys():
                    self._follow(vars(kind)[inner])
        if type(value) is types.ModuleType and not _is_foreign(value.__name__):
            space = vars(value)
            for inner in names & space.keys():
                if not isinstance(space[inner], types.ModuleType):
                    self._variable(space, inner, partial(space.get, inner), names - {inner})


def refused(division: Dividing, name: str) -> ChangesOutside:
    """That calls which change a variable outside of their module cannot be divided."""
    cause = f"it changes `{name}`, a variable outside of it: what a rank puts there is that of its part"
    problem = division.refused(cause)
    return ChangesOutside(problem.error, cause=problem.cause, hint=problem.hint)


def _itself(value: Any) -> Any:
    return value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


def copied_safely(value: Any) -> Any:
    """What `is_same` needs of a value."""
    try:
        foreign = isinstance(value, type | types.FunctionType) and _is_foreign(value.__module__)
        return value if foreign else copied(value, _identified)
    except Exception:  # noqa: BLE001  an object may raise whatever it is asked for
        return value


def _identified(value: Any) -> Any:
    """What tells whether it is written to: a tensor's version; an array's bytes, for it knows no version."""
    if isinstance(value, torch.Tensor):
        return value, value._version
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return (value, value.tobytes()) if value.nbytes <= MOST_BYTES and not value.dtype.hasobject else value
    return value


def is_same(before: Any, after: Any) -> bool:
    """Whether a copy is another one, or has come of it: there may be more in a dict, and something where None was."""
    if before is after:
        return True
    if before is None:
        return not _is_trained(after)
    if isinstance(before, (*SIMPLE, frozenset)) and isinstance(after, (*SIMPLE, frozenset)):
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
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_is_trained, inner))


def _named(name: str, before: Any, after: Any) -> str:
    """A variable's name, with that of the attribute that has changed."""
    return (
        f"{name}.{_differing(before, after)[0]}" if isinstance(before, Fields) and isinstance(after, Fields) else name
    )
