"""What does a name mean in the script's code, or an attribute of its objects? No code of its own is run for that.

Attributes are looked up as Python would, except that what would call a function of the script's (`__getattr__`, a
descriptor) is not known. What was found in code (a method, a global) is guarded: the program holds while it is found
again. In: names and objects. Out: what has been seen, or a function to read.
"""

from __future__ import annotations

import builtins
import inspect
import types
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items import operations
from flatout.frameworks.pytorch.input.items.recording import Recording, Seen
from flatout.frameworks.pytorch.input.items.rows import Unvectorised, kind_of

_ABSENT = object()


class Lookup:
    """Finds what code refers to."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    # -- names ---------------------------------------------------------------------------------------------------

    def name(self, function: types.FunctionType, name: str) -> Seen:
        """A name that is no local one: of an enclosing function, of the module, or of Python's."""
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            try:
                value = cell.cell_contents
            except ValueError:
                raise self._recording.unread(f"`{name}` has no value yet") from None
            self._recording.guard(cell, name, lambda: cell.cell_contents is value)
            return self._recording.constant(value)
        names = function.__globals__
        if name in names:
            value = names[name]
            self._recording.guard(names, name, lambda: names.get(name, _ABSENT) is value)
            return self._recording.constant(value)
        if name in ("super", "locals", "globals", "eval", "exec") or not hasattr(builtins, name):
            raise self._recording.unread(f"`{name}`")
        self._recording.guard(names, name, lambda: name not in names)
        return self._recording.constant(getattr(builtins, name))

    # -- attributes ----------------------------------------------------------------------------------------------

    def attribute(self, of: Seen, name: str) -> Any:
        """An attribute: what has been seen, a function of the class, or a property of it."""
        recording, value = self._recording, of.value
        if isinstance(value, types.ModuleType):
            names = vars(value)
            if name not in names:
                raise recording.unread(f"`{value.__name__}.{name}`")
            found = names[name]
            recording.guard(value, name, lambda: names.get(name, _ABSENT) is found)
            return recording.constant(found)
        if isinstance(value, type):
            return self._of_class(value, name)
        kind = type(value)
        if of.varies or isinstance(value, torch.Tensor | np.ndarray | np.generic) or kind.__module__ == "builtins":
            raise recording.unread(f"`{kind.__name__}.{name}`")
        if inspect.getattr_static(kind, "__getattribute__") is not vars(object)["__getattribute__"]:
            raise recording.unread(f"`{kind.__name__}` looks attributes up in its own way")
        recording.of_type(of, kind)
        in_class = inspect.getattr_static(kind, name, _ABSENT)
        if type(in_class) is property:
            self._same_in_class(kind, name, in_class)
            return in_class
        if any(hasattr(type(in_class), part) for part in ("__set__", "__delete__")):
            raise recording.unread(f"`{kind.__name__}.{name}`, which is looked up in its own way")
        if name in getattr(value, "__dict__", ()):
            return recording.attribute(of, name)
        if isinstance(in_class, types.FunctionType):
            recording.absent(of, name)
            self._guarded(kind, name, in_class)
            return in_class
        if in_class is not _ABSENT and not hasattr(type(in_class), "__get__"):
            return recording.attribute(of, name)
        raise recording.unread(f"`{kind.__name__}.{name}`")

    def _of_class(self, kind: type, name: str) -> Seen:
        found = inspect.getattr_static(kind, name, _ABSENT)
        if found is _ABSENT or (hasattr(type(found), "__get__") and not isinstance(found, kind)):
            raise self._recording.unread(f"`{kind.__name__}.{name}`")
        self._same_in_class(kind, name, found)
        return self._recording.constant(getattr(kind, name))

    def special(self, of: Seen, name: str) -> types.FunctionType:
        """A method such as `__getitem__`, which Python looks up in the class alone."""
        kind = type(of.value)
        found = inspect.getattr_static(kind, name, _ABSENT)
        if of.varies or not isinstance(found, types.FunctionType) or isinstance(of.value, torch.nn.Module):
            raise self._recording.unread(f"`{name}` of `{kind.__module__}.{kind.__qualname__}`")
        self._recording.of_type(of, kind)
        self._guarded(kind, name, found)
        return found

    def same(self, callee: Seen) -> None:
        """The function that is called has to be this one."""
        function = callee.value
        self._same_code(function)
        same = operations.Operation("is", lambda one: one is function, lambda one: False)
        self._recording.truth(self._recording.apply(same, [callee]))

    def _guarded(self, kind: type, name: str, function: types.FunctionType) -> None:
        self._same_in_class(kind, name, function)
        self._same_code(function)

    def _same_in_class(self, kind: type, name: str, found: Any) -> None:
        classes = [vars(one) for one in kind.__mro__]

        def holds() -> bool:
            return next((names[name] for names in classes if name in names), _ABSENT) is found

        self._recording.guard(kind, name, holds)

    def _same_code(self, function: types.FunctionType) -> None:
        code, defaults, named = function.__code__, function.__defaults__, dict(function.__kwdefaults__ or {})

        def holds() -> bool:
            same = function.__code__ is code and function.__defaults__ is defaults
            return same and (function.__kwdefaults__ or {}) == named

        self._recording.guard(function, "__code__", holds)

    # -- values --------------------------------------------------------------------------------------------------

    def known(self, seen: Seen) -> bool:
        """Whether a value is of a kind whose operations stand in the list."""
        if seen.parts is not None:
            return False
        try:
            kind_of(seen.value)
        except Unvectorised:
            return False
        return True

    def answered(self, function: Any, given: list[Seen], named: dict[str, Seen]) -> Seen | None:
        """What a function gives that looks at types, or at what all items share; None where it is no such function."""
        recording = self._recording
        if named:
            return None
        if function is torch.get_default_dtype and not given:
            return recording.apply(operations.Operation("torch.get_default_dtype", function, function), given)
        if not given:
            return None
        if function in (isinstance, torch.is_tensor, callable):
            if any(seen.varies and not self.known(seen) for seen in given):
                raise recording.unread("the type of what differs from item to item")
            for seen in given:
                recording.of_type(seen, type(seen.value))
            return recording.constant(function(*[seen.value for seen in given]))
        if function in (tuple, list) and len(given) == 1 and type(given[0].parts) in (tuple, list):
            return recording.structure(function(given[0].parts))
        simple = all(
            type(seen.value) in (int, float, str, list, tuple, dict, torch.Tensor, np.ndarray) for seen in given
        )
        if function in (len, min, max, abs, bool, range) and simple and not any(seen.varies for seen in given):
            return recording.apply(operations.Operation(function.__name__, function, function), given)
        return None
