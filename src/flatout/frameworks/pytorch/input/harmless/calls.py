"""What does a call give, and does it do any harm?

In: calls in the script's code, and what is known of their operands. Out: values.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import inspect
import random
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.harmless.frames import Frame, LocalFunction, num_mentions
from flatout.frameworks.pytorch.input.harmless.listed import effect_of
from flatout.frameworks.pytorch.input.harmless.named import effect_of_method, gives_element, keeps_operands
from flatout.frameworks.pytorch.input.harmless.operands import (
    Operands,
    check_keywords,
    check_method,
    check_places,
    may_share,
)
from flatout.frameworks.pytorch.input.harmless.resolving import Refused, is_library, is_of_library
from flatout.frameworks.pytorch.input.harmless.transforms import MadeTransform, is_chain, is_transform, parts_of
from flatout.frameworks.pytorch.input.harmless.values import OWN, SHARED, Value, joined, known
from flatout.frameworks.pytorch.seams.patches import original_of

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.harmless.walking import Walker

_READING = frozenset(("r", "rb", "rt"))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SAFE = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum)
"""What runs no code of the script's when it is given to a library."""
_HOLDING = (collections.OrderedDict, collections.defaultdict, collections.deque, functools.reduce, sum)
"""What gives or holds elements of what it is given, and not copies."""
_SIMPLE_MADE = (int, float, str, bool, len, abs, round)
_FILE_METHODS = frozenset(("read", "readline", "readlines", "seek", "tell"))


class Calls:
    """Looks at calls."""

    def __init__(self, walker: Walker) -> None:
        self._walker = walker
        self.opens_images = False
        """Whether `PIL.Image.open` was among them."""
        self._opens_operand = False
        """Whether a function opens an image from what it is given, which may be a file."""
        self._arrays: list[tuple[ast.Call, types.CodeType]] = []
        """Calls of `numpy.array`, and the functions in which they stand."""
        self._given_on: list[ast.expr] = []
        """What is given to `torch.from_numpy`."""

    def straight(self) -> frozenset[types.CodeType]:
        """Functions in which arrays are made for `torch.from_numpy`, which stands around the call, and nothing else."""
        given_on = {id(node) for node in self._given_on}
        elsewhere = {code for node, code in self._arrays if id(node) not in given_on}
        codes = {code: len({id(node) for node, other in self._arrays if other is code}) for _, code in self._arrays}
        elsewhere |= {code for code, num in codes.items() if num_mentions(code, "array") != num}
        return frozenset(code for _, code in self._arrays if code not in elsewhere)

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """What a call gives.

        Raises:
            Refused: It may do harm.
        """
        function = node.func
        if isinstance(function, ast.Name) and function.id not in frame.names:
            special = self._special(function.id, node, frame)
            if special is not None:
                return special
        if isinstance(function, ast.Attribute):
            of = self._walker.expressions.value(function.value, frame)
            operands = self._operands(node, frame)
            self._note_file(function, node, frame)
            self._note_array(of, node, frame)
            return self._method(of, function, operands, frame)
        callee = self._walker.expressions.value(function, frame)
        return self._any(callee, self._operands(node, frame), ast.unparse(function))

    def _operands(self, node: ast.Call, frame: Frame) -> Operands:
        values, named, is_open = [], {}, False
        for one in node.args:
            is_open = is_open or isinstance(one, ast.Starred)
            values.append(self._walker.expressions.value(one, frame))
            if isinstance(one, ast.Name):
                frame.passed.add(one.id)
        for keyword in node.keywords:
            value = self._walker.expressions.value(keyword.value, frame)
            if keyword.arg is None:
                is_open = True
                values.append(value.element())
            else:
                named[keyword.arg] = value
        return Operands(values, named, is_open)

    # -- what Python itself knows --------------------------------------------------------------------------------

    def _special(self, name: str, node: ast.Call, frame: Frame) -> Value | None:
        """Calls of Python's own whose meaning depends on where they stand."""
        value = self._walker.expressions.value
        if name == "super" and not node.args and frame.owner is not None:
            this = frame.names[frame.function.__code__.co_varnames[0]]
            return known(Super(frame.owner, this.sole()))
        if name in ("isinstance", "callable"):
            for one in node.args:
                value(one, frame)
            found = self._walker.expressions.truth(node, frame)
            return OWN if found is None else known(found)
        if name == "getattr" and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
            return self._walker.expressions.attribute(value(node.args[0], frame), str(node.args[1].value))
        if name == "len" and len(node.args) == 1:
            of = value(node.args[0], frame)
            for thing in of.among or ():
                if not is_of_library(thing):
                    self._walker.run(self._walker.resolver.method(thing, "__len__"), [], {})
            return OWN
        if name == "open":
            self._opened(node)
            self._operands(node, frame)
            return OWN
        return None

    def _opened(self, node: ast.Call) -> None:
        modes = [*node.args[1:2], *(one.value for one in node.keywords if one.arg == "mode")]
        if any(not isinstance(mode, ast.Constant) or mode.value not in _READING for mode in modes):
            raise Refused("a file is opened, and not for reading")

    # -- methods -------------------------------------------------------------------------------------------------

    def _method(self, of: Value, node: ast.Attribute, operands: Operands, frame: Frame) -> Value:
        """A call of something that belongs to something."""
        name = node.attr
        if of.among is None:
            return self._by_name(of, node, operands, frame)
        found = []
        for thing in of.among:
            if isinstance(thing, _GENERATORS):
                raise Refused(f"`{name}` draws from a generator of the script's own")
            is_thing = not isinstance(thing, types.ModuleType | type | Super)
            if is_thing and is_of_library(thing) and name not in getattr(thing, "__dict__", ()):
                if isinstance(thing, torch.nn.Module):
                    raise Refused(f"`{type(thing).__name__}.{name}` is called")
                found.append(self._by_name(Value((thing,), of.own, of.parts, of.each), node, operands, frame))
            else:
                found.append(self._any(self._bound(thing, name), operands, ast.unparse(node)))
        return joined(found)

    def _bound(self, thing: Any, name: str) -> Value:
        if isinstance(thing, Super):
            return known(thing.method(name))
        return self._walker.expressions.attribute(known(thing), name)

    def _by_name(self, of: Value, node: ast.Attribute, operands: Operands, frame: Frame) -> Value:
        """A method of what a library made, by its name."""
        effect = effect_of_method(node.attr)
        if effect is None:
            raise Refused(f"`.{node.attr}()` of something that is not known")
        check_keywords(node.attr, operands)
        check_method(node.attr, operands)
        self._walker.resolver.require_library(of)
        if not keeps_operands(node.attr):
            for value in operands.all():
                for one in value.among or ():
                    self._passed_on(one, node.attr)
        if effect == "changes":
            if not of.own:
                raise Refused(f"`.{node.attr}()` changes something that is not the item's own")
            for value in operands.all() if keeps_operands(node.attr) else ():
                self._walker.expressions.hold(node.value, value, frame)
            return self._walker.resolver.element(of) if gives_element(node.attr) else OWN
        if effect == "makes" and not may_share(node.attr, operands):
            if node.attr == "copy" and not of.own:  # of a list or a dictionary, whose elements stay the same
                return Value(own=True, each=self._walker.resolver.element(of))
            return OWN
        thing = of.sole()
        if node.attr in ("items", "values", "get") and (of.each is not None or isinstance(thing, dict)):
            part = self._walker.resolver.element(of)
            if node.attr == "get":
                return joined([part, *operands.values[1:]])
            return Value(own=True, each=Value(own=True, parts=(OWN, part)) if node.attr == "items" else part)
        return Value(own=of.own)

    def _note_file(self, function: ast.Attribute, node: ast.Call, frame: Frame) -> None:
        """A file from which an image is opened is not read by anything else: it may be read later."""
        if function.attr == "open" and node.args and isinstance(node.args[0], ast.Name):
            frame.opened.add(node.args[0].id)
            code = frame.function.__code__
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._opens_operand = self._opens_operand or node.args[0].id in given
        if function.attr in _FILE_METHODS and isinstance(function.value, ast.Name):
            frame.read.add(function.value.id)
        if frame.opened & frame.read or (self._opens_operand and frame.passed & frame.read):
            raise Refused("a file from which an image is opened is read by the script as well")

    def _note_array(self, of: Value, node: ast.Call, frame: Frame) -> None:
        """An array is made, or a tensor of one."""
        name, module = node.func.attr if isinstance(node.func, ast.Attribute) else "", of.sole()
        if name == "from_numpy" and module is torch and len(node.args) == 1 and is_builtin(torch.from_numpy):
            self._given_on.append(node.args[0])
        if name == "array" and module is np:
            self._arrays.append((node, frame.function.__code__))

    # -- functions and objects -----------------------------------------------------------------------------------

    def _any(self, callee: Value, operands: Operands, text: str) -> Value:
        if callee.among is None:
            raise Refused(f"it is not known what `{text}` calls")
        return joined([self._one(thing, operands, text) for thing in callee.among])

    def _one(self, thing: Any, operands: Operands, text: str) -> Value:
        """A call of one function, class or object."""
        check_keywords(text, operands)
        effect = effect_of(thing)
        if effect is not None:
            return self._listed(thing, effect, operands, text)
        if isinstance(getattr(thing, "__self__", None), _GENERATORS):
            raise Refused(f"`{text}` is called")
        if isinstance(thing, functools.partial):
            named = {name: known(value) for name, value in thing.keywords.items()} | operands.named
            given = Operands([*map(known, thing.args), *operands.values], named, operands.open)
            return self._one(thing.func, given, text)
        if isinstance(thing, types.FunctionType | types.MethodType | LocalFunction):
            return self._run(thing, operands, text)
        if isinstance(thing, type):
            return self._made(thing, operands, text)
        if isinstance(thing, MadeTransform) or is_transform(type(thing)):
            return self._transformed(thing, operands)
        return self._object(thing, operands, text)

    def _listed(self, thing: Any, effect: str, operands: Operands, text: str) -> Value:
        """A function whose effect is known."""
        opens = getattr(sys.modules.get("PIL.Image"), "open", None)
        self.opens_images = self.opens_images or thing is original_of(opens)
        for value in operands.all():
            for one in value.among or ():
                self._passed_on(one, text)
        values = operands.all()
        check_places(thing, text, operands)
        if effect == "changes" and values and not values[0].own:
            raise Refused(f"`{text}` changes something that is not the item's own")
        name = getattr(thing, "__name__", "")
        if effect == "makes" and not may_share(name, operands):
            element = self._walker.resolver.element
            if name in ("choice", "getitem") and values:
                return element(values[0])
            if thing in _HOLDING or getattr(thing, "__module__", None) == "itertools":
                found = [element(value) for value in values if not any(map(_is_called, value.among or ()))]
                return Value(own=thing is not functools.reduce, each=joined(found) if found else None)
            if name in ("choices", "sample", "deepcopy", "copy") and values:
                return Value(own=True, each=element(values[0]) if name != "deepcopy" else None)
            return OWN
        return self._passing(thing, operands)

    def _passing(self, thing: Any, operands: Operands) -> Value:
        """What gives parts of what it is given."""
        element, values = self._walker.resolver.element, operands.all()
        if thing is next and values:
            return element(values[0])
        if thing is enumerate and values:
            return Value(own=True, each=Value(own=True, parts=(OWN, element(values[0]))))
        if thing is zip:
            return Value(own=True, each=Value(own=True, parts=tuple(element(value) for value in values)))
        if thing in (list, tuple, set, frozenset, sorted, reversed, iter, min, max, filter):
            if not values:
                return Value(own=True, parts=())
            each = element(values[-1] if thing is filter else values[0])
            return each if thing in (min, max) else Value(own=True, each=each)
        if thing is dict:
            return Value(own=True, each=joined(values)) if values else Value(own=True, parts=())
        if thing is map:
            simple = all(one in _SIMPLE_MADE for one in values[0].among or (None,)) if values else False
            return Value(own=True, each=OWN if simple else SHARED)
        return Value(own=all(value.own for value in values))

    def _passed_on(self, thing: Any, text: str) -> None:
        """A function may be given only what it can be called with, or what no code of the script's belongs to."""
        if isinstance(thing, types.FunctionType | types.MethodType | LocalFunction | functools.partial):
            if effect_of(thing) is None:
                self._one(thing, Operands([SHARED] * 8, {}, open=True), text)
        elif not isinstance(thing, _SAFE) and not is_of_library(thing):
            raise Refused(f"a `{type(thing).__name__}` is given to `{text}`")

    def _run(self, thing: Any, operands: Operands, text: str) -> Value:
        home = getattr(thing, "__module__", None) or ""
        inherited = isinstance(thing, types.MethodType) and home.startswith("torchvision.transforms.")
        if is_library(home) and not inherited:
            raise Refused(f"`{text}` is called")
        if operands.open:
            return self._walker.run(thing, [], {})
        return self._walker.run(thing, operands.values, operands.named)

    def _made(self, kind: type, operands: Operands, text: str) -> Value:
        """A class that is called: only torchvision's transforms, and such as merely keep what they are given."""
        if is_transform(kind):
            parts = [part for value in operands.all() for part in self._callables(value, text)]
            return known(MadeTransform(kind, parts, in_place="inplace" in operands.named), own=True)
        simple = issubclass(kind, tuple) and hasattr(kind, "_fields")
        if not simple and not (dataclasses.is_dataclass(kind) and not hasattr(kind, "__post_init__")):
            raise Refused(f"a `{kind.__name__}` is made")
        return Value(own=all(value.own for value in operands.all()))

    def _callables(self, value: Value, text: str) -> list[Any]:
        """What can be called of what a transform is given."""
        parts = self._walker.resolver.elements(value)
        if parts is not None:
            return [one for part in parts for one in self._callables(part, text)]
        if value.each is not None:
            return self._callables(value.each, text)
        if value.among is None and not value.own:
            raise Refused(f"it is not known what is given to `{text}`")
        return [thing for thing in value.among or () if callable(thing) and not isinstance(thing, type | enum.Enum)]

    def _transformed(self, thing: Any, operands: Operands) -> Value:
        """A transform of torchvision's: what it was given may get what it gets, or what another one gives."""
        if isinstance(thing, torch.nn.Module) and _is_hooked(thing):
            raise Refused(f"`{type(thing).__name__}` has hooks")
        made = isinstance(thing, MadeTransform)
        kind = thing.kind if made else type(thing)
        value = Value(own=all(value.own for value in operands.all()))
        if (thing.in_place if made else getattr(thing, "inplace", False)) and not value.own:
            raise Refused(f"`{kind.__name__}` changes something that is not the item's own")
        parts = thing.parts if made else list(parts_of(thing, self._walker.guards))
        found = [value]
        for part in parts:
            given = found[-1] if is_chain(kind) else value
            found.append(Value(own=self._one(part, Operands([given], {}), kind.__name__).own))
        if is_chain(kind) or all(one.own for one in found):
            return found[-1]
        for part in parts:
            self._one(part, Operands([SHARED], {}), kind.__name__)
        return SHARED

    def _object(self, thing: Any, operands: Operands, text: str) -> Value:
        """An object that is called."""
        kind = type(thing)
        if kind.__module__.startswith(("albumentations", "imgaug")):
            raise Refused(f"`{kind.__name__}` draws from a generator of its own")
        name = "__call__"
        if isinstance(thing, torch.nn.Module):
            if _is_hooked(thing):
                raise Refused(f"`{kind.__name__}` has hooks")
            name = "forward" if kind.__call__ is torch.nn.Module.__call__ else name
        if not isinstance(inspect.getattr_static(kind, name, None), types.FunctionType):
            raise Refused(f"`{text}` is called")
        return self._run(self._walker.resolver.method(thing, name), operands, text)


def _is_called(thing: Any) -> bool:
    """Whether something is a function that another one is given."""
    return callable(thing) or isinstance(thing, LocalFunction)


def is_builtin(function: Any) -> bool:
    """Whether a function is one of a library's C part."""
    return isinstance(original_of(function), types.BuiltinFunctionType)


class Super:
    """What `super()` gives."""

    def __init__(self, owner: type, thing: Any) -> None:
        self._owner = owner
        self._thing = thing

    def method(self, name: str) -> types.MethodType:
        """A method of a class behind the one in which the code stands.

        Raises:
            Refused: It is none of Python code.
        """
        order = type(self._thing).__mro__
        behind = order[order.index(self._owner) + 1 :] if self._owner in order else ()
        found = next((vars(one)[name] for one in behind if name in vars(one)), None)
        if not isinstance(found, types.FunctionType):
            raise Refused(f"`super().{name}` is not known")
        return types.MethodType(found, self._thing)


def _is_hooked(module: torch.nn.Module) -> bool:
    from torch.nn.modules import module as modules

    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (
        any(own)
        or bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)
        or "forward" in vars(module)
    )
