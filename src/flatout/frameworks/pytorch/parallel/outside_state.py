"""What can a model's own code write outside of it, and has a call done so?

In: a module. Out: names of variables (globals, closures) that a call has changed. What a rank writes there is that of
its part, and a call that is computed both ways writes more than once.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flatout.frameworks.pytorch.parallel.refusal import ChangesOutside

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.division import Division

_CONTAINERS = (dict, list, set, deque)
_VALUES = (bool, int, float, complex, str, bytes)
_NEVER = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.nn.Module, torch.optim.Optimizer,
          torch.Generator)  # fmt: skip

Place = tuple[object, str, Callable[[], Any]]
"""What holds a variable, its name, and how its value is found."""


class OutsideState:
    """What a module's code can write outside of the module.

    Args:
        module: A model; its code is that of all classes of its modules that are not PyTorch's.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = list({(id(space), name): (name, value) for space, name, value in _places(module)}.values())

    def seen(self) -> list[Any]:
        """A shallow copy of what is there; it keeps what it holds alive, so that nothing new is taken for it."""
        return [_copied(value()) for _, value in self._places]

    def changed(self, before: list[Any]) -> list[str]:
        """Names of variables that are not what they were.

        A dict may have new keys, as one that keeps masks does, but none whose value is to be trained.
        """
        pairs = zip(self._places, before, self.seen(), strict=True)
        return sorted({name for (name, _), former, now in pairs if not _is_same(former, now)})


def refused(division: Division, name: str) -> ChangesOutside:
    """That calls which change a variable outside of their module cannot be divided."""
    cause = f"it changes `{name}`, a variable outside of it: what a rank puts there is that of its part"
    problem = division.refused(cause)
    return ChangesOutside(problem.error, cause=problem.cause, hint=problem.hint)


def _places(module: torch.nn.Module) -> Iterator[Place]:
    visited: set[types.CodeType] = set()
    for kind in {one for part in module.modules() for one in type(part).__mro__}:
        for member in vars(kind).values() if not _is_pytorchs(kind.__module__) else ():
            yield from _of_function(_function(member), visited)
    for part in module.modules():
        for member in vars(part).values():
            yield from _of_function(member, visited)


def _function(member: Any) -> Any:
    return getattr(member, "fget", None) or getattr(member, "__func__", None) or member


def _of_function(function: Any, visited: set[types.CodeType]) -> Iterator[Place]:
    """The variables that a function names, and those of the functions among them."""
    if not isinstance(function, types.FunctionType) or function.__code__ in visited:
        return
    visited.add(function.__code__)
    if _is_pytorchs(function.__module__ or ""):
        return
    space = function.__globals__
    for name in _names(function.__code__):
        if name in space:
            yield from _of_function(space[name], visited)
            yield space, name, partial(space.get, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield cell, name, partial(_content, cell)


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


def _is_pytorchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins")


def _copied(value: Any, *, deep: bool = True) -> Any:
    """What a comparison needs: values, tensors with their version, what containers and plain objects hold."""
    if isinstance(value, torch.Tensor):
        return value, value._version
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, _CONTAINERS):
        return list(value)
    if isinstance(value, (*_VALUES, *_NEVER)) or not deep:
        return value
    fields = getattr(value, "__dict__", None)
    return {name: _copied(one, deep=False) for name, one in fields.items()} if type(fields) is dict else value


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, _VALUES) and isinstance(after, _VALUES):
        return before == after
    if isinstance(before, dict) and isinstance(after, dict):
        added = (value for name, value in after.items() if name not in before)
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in added):
            return False
        return all(name in after and _is_same(value, after[name]) for name, value in before.items())
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return len(before) == len(after) and all(map(_is_same, before, after))
    return False
