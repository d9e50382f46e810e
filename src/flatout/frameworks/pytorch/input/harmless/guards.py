"""Is the code that was looked at still the code that would run? Names, attributes and functions, each the one it was.

In: what was found while looking. Out: whether it would be found again.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.seams.patches import original_of
from flatout.guest.interruptions import let_through

_ABSENT = object()

_CHANGING = (list, tuple, dict, set, bytearray, collections.deque, np.ndarray, torch.Tensor)


class Guards:
    """What has to stay as it is."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._cells: dict[int, tuple[Any, Any]] = {}
        self._codes: dict[int, tuple[types.FunctionType, types.CodeType, Any, Any]] = {}
        self._lists: dict[int, tuple[list[Any], tuple[Any, ...]]] = {}

    def name(self, names: Any, name: Any, value: Any = _ABSENT) -> None:
        """A name of a dictionary means this, or nothing."""
        self._names[id(names), name] = names, name, value

    def in_class(self, kind: type, name: str, value: Any = _ABSENT) -> None:
        """A name of a class itself means this, or nothing."""
        self._names[id(kind), name] = vars(kind), name, value  # type: ignore[assignment]

    def cell(self, cell: Any, value: Any) -> None:
        """A variable of an enclosing function is this."""
        self._cells[id(cell)] = cell, value

    def code(self, function: types.FunctionType) -> None:
        """A function has this code and these defaults."""
        self._codes[id(function)] = function, function.__code__, function.__defaults__, function.__kwdefaults__

    def elements(self, things: list[Any]) -> None:
        """A list has these elements."""
        self._lists[id(things)] = things, tuple(things)

    def data(self) -> list[Any]:
        """What the code refers to and can be changed in place: what names, variables and lists are."""
        values = [value for _, _, value in self._names.values()]
        values += [value for _, value in self._cells.values()] + [things for things, _ in self._lists.values()]
        values += [value for _, _, defaults, named in self._codes.values() for value in _all_of(defaults, named)]
        found = {id(value): value for value in values if isinstance(value, _CHANGING)}
        return list(found.values())

    def modules(self) -> set[str]:
        """Where the functions stand whose code was looked at."""
        return {function.__module__ for function, *_ in self._codes.values() if function.__module__}

    def hold(self) -> bool:
        """Whether all is as it was."""
        try:
            return self._hold()
        except Exception as problem:  # noqa: BLE001  what can no longer be looked at does not hold
            let_through(problem)
            return False

    def _hold(self) -> bool:
        return (
            all(original_of(names.get(name, _ABSENT)) is value for names, name, value in self._names.values())
            and all(cell.cell_contents is value for cell, value in self._cells.values())
            and all(
                one.__code__ is code and one.__defaults__ is defaults and one.__kwdefaults__ is named
                for one, code, defaults, named in self._codes.values()
            )
            and all(
                len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
                for now, then in self._lists.values()
            )
        )


def _all_of(defaults: tuple[Any, ...] | None, named: dict[str, Any] | None) -> Iterator[Any]:
    """The values that a function's operands have by default."""
    yield from defaults or ()
    yield from (named or {}).values()
