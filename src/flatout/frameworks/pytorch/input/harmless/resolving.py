"""What does a name or an attribute mean in the script's code? Looked up without running any of the script's code.

What was found is guarded, so that it can be seen whether it would be found again. In: names, and values. Out: values.
"""

from __future__ import annotations

import builtins
import collections
import enum
import inspect
import types
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.harmless.guards import Guards
from flatout.frameworks.pytorch.input.harmless.named import is_plain_attribute
from flatout.frameworks.pytorch.input.harmless.values import IMMUTABLE, MOST_AMONG, OWN, SHARED, Value, joined, known
from flatout.frameworks.pytorch.seams.patches import original_of

_ABSENT = object()

LIBRARIES = frozenset((
    "builtins", "numpy", "torch", "PIL", "pandas", "pathlib", "collections", "torchvision", "decimal", "datetime",
    "fractions", "array", "re", "_io", "io", "types",
))  # fmt: skip
"""Packages whose objects do nothing when they are looked at."""

_CODE = ("torch.utils.data", "torchvision.datasets")
"""Parts of them whose code and objects are looked at like the script's own."""

MOST_ELEMENTS = 5_000_000
"""Elements of a list whose classes are looked at."""

MOST_LOOKED_AT = 1000
"""Elements that are looked into."""


class Refused(Exception):
    """Something may do harm, or is not known; the message says what and where."""

    def __init__(self, why: str, *, placed: bool = False) -> None:
        super().__init__(why)
        self.placed = placed
        """Whether it says where."""


def is_of_library(thing: Any) -> bool:
    """Whether an object is of a class of a known library, and no dataset."""
    return is_library_class(type(thing))


def is_library_class(kind: type) -> bool:
    """Whether objects of a class do nothing when they are looked at."""
    return is_library(kind.__module__)


def is_library(home: str) -> bool:
    """Whether the code of a module is a library's that is known, or taken for harmless only where it is listed."""
    return home.split(".")[0] in LIBRARIES and home != "torchvision" and not home.startswith(_CODE)


def goes_on(kind: type) -> bool:
    """Whether objects of a class are another thing each time they are asked: iterators, files, generators."""
    return hasattr(kind, "__next__") or issubclass(kind, torch.Generator | np.random.Generator | np.random.RandomState)


def gives_elements_simply(kind: type) -> bool:
    """Whether an element of a list, a tuple or a dictionary of a class is what was put there, and nothing is done."""
    simple = isinstance(inspect.getattr_static(kind, "__getitem__", None), _C_METHODS)
    return simple and (kind is collections.Counter or not hasattr(kind, "__missing__"))


_C_METHODS = (types.WrapperDescriptorType, types.MethodDescriptorType)


class Resolver:
    """Finds what code refers to."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self.shares = False
        """Whether something that is the item's own was given elements that are not; it may have other names."""

    # -- names ---------------------------------------------------------------------------------------------------

    def name(self, function: types.FunctionType, name: str) -> Value:
        """A name that is no local one: of an enclosing function, of the module, or of Python's.

        Raises:
            Refused: There is none.
        """
        code = function.__code__
        if name in code.co_freevars:
            cell = (function.__closure__ or ())[code.co_freevars.index(name)]
            try:
                value = cell.cell_contents
            except ValueError:
                raise Refused(f"`{name}` has no value yet") from None
            self._guards.cell(cell, value)
            return known(value)
        names = function.__globals__
        if name in names:
            self._guards.name(names, name, names[name])
            return known(names[name])
        if not hasattr(builtins, name):
            raise Refused(f"`{name}` is not known")
        self._guards.name(names, name)
        return known(getattr(builtins, name))

    # -- attributes ----------------------------------------------------------------------------------------------

    def attribute(self, of: Value, name: str) -> Value:
        """An attribute; a method as one that is bound, a property as its function's.

        Raises:
            Refused: Reading it may run code that is not known.
        """
        if of.among is None:
            if not is_plain_attribute(name) and not self._is_field(of, name):
                raise Refused(f"`.{name}` of something that is not known")
            return Value(own=of.own)
        return joined([self._of_one(thing, name, of.own) for thing in of.among])

    def _is_field(self, of: Value, name: str) -> bool:
        """Whether all objects that it may be keep this attribute simply."""
        return of.kinds is not None and all(_keeps(kind, name) for kind in of.kinds)

    def _of_one(self, thing: Any, name: str, own: bool) -> Value:
        if isinstance(thing, types.ModuleType):
            names = vars(thing)
            if name not in names:
                raise Refused(f"`{thing.__name__}.{name}` is not known")
            found = original_of(names[name])
            self._guards.name(names, name, found)
            return known(found)
        if isinstance(thing, type):
            return self._of_class(thing, name)
        if is_of_library(thing):
            return self._of_library(thing, name, own)
        return self._of_object(thing, name)

    def _of_class(self, kind: type, name: str) -> Value:
        found = inspect.getattr_static(kind, name, _ABSENT)
        if isinstance(found, staticmethod | classmethod | types.FunctionType | types.BuiltinFunctionType):
            self._in_class(kind, name, found)
            return known(getattr(kind, name))
        if isinstance(kind, enum.EnumMeta) and isinstance(getattr(kind, name, None), kind):
            return known(getattr(kind, name), own=True)
        if found is _ABSENT or hasattr(type(found), "__get__"):
            if kind.__module__.split(".")[0] in LIBRARIES and hasattr(kind, name):
                return known(getattr(kind, name))
            raise Refused(f"`{kind.__name__}.{name}` is not known")
        self._in_class(kind, name, found)
        return known(found)

    def _of_library(self, thing: Any, name: str, own: bool) -> Value:
        """Of what a library made: what it keeps, or what a plain attribute gives."""
        kept = getattr(thing, "__dict__", None)
        if isinstance(kept, dict) and name in kept:
            self._guards.name(kept, name, kept[name])
            return known(kept[name])
        if isinstance(thing, torch.nn.Module):
            return self._of_module(thing, name)
        if not is_plain_attribute(name) and not isinstance(thing, IMMUTABLE):
            raise Refused(f"`{type(thing).__name__}.{name}`")
        return Value(own=own)

    def _of_object(self, thing: Any, name: str) -> Value:
        """Of an object of the script's own."""
        kind = type(thing)
        if not _looks_up_simply(kind):
            raise Refused(f"`{kind.__name__}` looks attributes up in its own way")
        found, kept = inspect.getattr_static(kind, name, _ABSENT), getattr(thing, "__dict__", {})
        if isinstance(found, property):
            self._in_class(kind, name, found)
            return Value((Property(found.fget, thing),))
        if hasattr(type(found), "__set__") and not isinstance(found, types.MemberDescriptorType | _FIELD):
            raise Refused(f"`{kind.__name__}.{name}` is looked up in its own way")
        if name in kept:
            self._guards.name(kept, name, kept[name])
            return known(kept[name])
        if isinstance(found, types.FunctionType):
            self._in_class(kind, name, found)
            self._guards.name(kept, name)
            return known(types.MethodType(found, thing))
        if isinstance(found, staticmethod | classmethod):
            self._in_class(kind, name, found)
            return known(getattr(kind, name))
        if isinstance(thing, torch.nn.Module):
            return self._of_module(thing, name)
        if isinstance(found, types.MemberDescriptorType | _FIELD):
            return known(getattr(thing, name))
        if found is _ABSENT or hasattr(type(found), "__get__"):
            raise Refused(f"`{kind.__name__}.{name}` is not known")
        self._in_class(kind, name, found)
        return known(found)

    def _of_module(self, thing: torch.nn.Module, name: str) -> Value:
        for names in (thing._parameters, thing._buffers, thing._modules):
            if name in names:
                self._guards.name(names, name, names[name])
                return known(names[name])
        found = inspect.getattr_static(type(thing), name, _ABSENT)
        if isinstance(found, types.FunctionType):
            self._in_class(type(thing), name, found)
            return known(types.MethodType(found, thing))
        if found is _ABSENT or hasattr(type(found), "__get__"):
            raise Refused(f"`{type(thing).__name__}.{name}` is not known")
        return known(found)

    def method(self, thing: Any, name: str) -> types.MethodType:
        """A method such as `__getitem__`, which Python looks up in the class alone.

        Raises:
            Refused: It is none of Python code.
        """
        kind = type(thing)
        found = inspect.getattr_static(kind, name, _ABSENT)
        if not isinstance(found, types.FunctionType):
            raise Refused(f"`{name}` of `{kind.__module__}.{kind.__qualname__}` is not known")
        self._in_class(kind, name, found)
        return types.MethodType(found, thing)

    def _in_class(self, kind: type, name: str, found: Any) -> None:
        for one in kind.__mro__:
            if name in vars(one):
                self._guards.in_class(one, name, found)
                return
            self._guards.in_class(one, name)

    # -- elements ------------------------------------------------------------------------------------------------

    def elements(self, of: Value) -> list[Value] | None:
        """The elements of a short list or tuple that is known, one by one; None where they are not that."""
        if of.parts is not None:
            return list(of.parts)
        thing = of.sole()
        if isinstance(thing, torch.nn.ModuleList | torch.nn.Sequential):
            thing = list(thing._modules.values())
        if type(thing) not in (list, tuple) or len(thing) > MOST_AMONG:
            return None
        if type(thing) is list:
            self._guards.elements(thing)
        return [known(one) for one in thing]

    def element(self, of: Value) -> Value:
        """What one element may be, whichever it is."""
        if of.among is None or of.each is not None or of.parts:
            found = of.element()
            return Value(found.among, kinds=found.kinds) if self.shares and of.own else found
        return joined([self._element_of(thing, of) for thing in of.among])

    def _element_of(self, thing: Any, of: Value) -> Value:
        if isinstance(thing, str | bytes | range):
            return OWN
        if isinstance(thing, dict):
            thing = list(thing.values()) if len(thing) <= MOST_ELEMENTS else []
        if isinstance(thing, np.ndarray | torch.Tensor):
            if isinstance(thing, torch.Tensor) or not thing.dtype.hasobject:
                return SHARED
            thing = _objects_of(thing)
        one_by_one = self.elements(Value((thing,)))
        if one_by_one and any(callable(one.sole()) for one in one_by_one):
            return joined(one_by_one)
        if not isinstance(thing, list | tuple) or len(thing) > MOST_ELEMENTS:
            if is_of_library(thing):
                return SHARED
            raise Refused(f"an element of a `{type(thing).__name__}`")
        kinds = frozenset(map(type, thing))
        if kinds and all(issubclass(kind, IMMUTABLE) for kind in kinds):
            return Value(own=True, kinds=kinds)
        if one_by_one and not all(is_library_class(kind) for kind in kinds):
            return joined(one_by_one)
        for part in thing[:MOST_LOOKED_AT]:
            inner = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
            if any(not is_of_library(one) for one in inner):
                raise Refused("an element that holds an object of the script's own")
        return Value(kinds=kinds)

    def require_library(self, of: Value) -> None:
        """What is done by name is known of libraries' objects only.

        Raises:
            Refused: It may be an object of the script's own.
        """
        other = next((kind for kind in of.kinds or () if not is_library_class(kind) or goes_on(kind)), None)
        if other is not None:
            raise Refused(f"what a `{other.__name__}` does is not known beforehand")


class Property:
    """A property of an object, which is to be looked at as a call."""

    def __init__(self, function: Any, thing: Any) -> None:
        self.function = function
        self.thing = thing


def _looks_up_simply(kind: type) -> bool:
    """Whether attributes of objects of a class are looked up as Python does."""
    return isinstance(inspect.getattr_static(kind, "__getattribute__"), types.WrapperDescriptorType)


def _objects_of(array: np.ndarray) -> list[Any]:
    if array.ndim != 1 or array.dtype.names is not None:
        raise Refused("an element of an array of objects")
    return list(array)


def _keeps(kind: type, name: str) -> bool:
    """Whether objects of a class keep an attribute in their own dictionary, in a slot or as a field of a tuple."""
    if hasattr(kind, "__getattr__") or not _looks_up_simply(kind):
        return False
    found = inspect.getattr_static(kind, name, _ABSENT)
    return isinstance(found, types.MemberDescriptorType | _FIELD) or not hasattr(type(found), "__get__")


_FIELD: type = type(vars(collections.namedtuple("_Field", "one"))["one"])
"""What a named tuple has for each of its fields."""
