"""What does `dataset[index]` compute, of what? Its code is run once, statement by statement, and each operation noted.

The interpreter knows the plain part of Python that datasets are written in. It does what the script's code says, on
the script's own values, but only operations of the list; whatever else it meets ends the reading with the line and the
reason. A branch must go one way for all items; loops run over what all items share. In: a dataset and an index. Out:
the item, and the `Program` that gave it.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset

from flatout.frameworks.pytorch.input.items import operations, random_transforms, vision
from flatout.frameworks.pytorch.input.items.lookup import Lookup
from flatout.frameworks.pytorch.input.items.program import Program
from flatout.frameworks.pytorch.input.items.recording import Recording, Seen, Unread
from flatout.frameworks.pytorch.input.items.syntax import NoSource, syntax_of

MUCH_BYTES = 2**16
MOST_TAKEN = 8
"""How many times what an item keeps may be taken from the dataset for it, from so many bytes on."""

MAX_DEPTH = 12
MAX_ROUNDS = 64
"""Rounds of a loop, which are noted one after another."""


def read(dataset: Any, index: int) -> tuple[Any, Program]:
    """The item at `index`, and how it comes about."""
    recording = Recording(dataset, index)
    item = Reader(recording).item(recording.dataset, recording.index)
    kept_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(item.value))
    if recording.taken_bytes > max(MUCH_BYTES, MOST_TAKEN * kept_bytes):
        raise Unread("an item keeps little of what it takes from the dataset, and whole batches of that would be taken")
    return item.value, recording.program(item)


class _Returned(Exception):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen


class Frame:
    """One function that is being read."""

    def __init__(self, function: types.FunctionType, names: dict[str, Seen]) -> None:
        self.function = function
        self.names = names
        self.file = Path(function.__code__.co_filename).name


class Reader:
    """Runs functions and notes what they do."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lookup = Lookup(recording)
        self._depth = 0

    def item(self, dataset: Seen, index: Seen) -> Seen:
        """`dataset[index]` by its class's own `__getitem__`."""
        if type(dataset.value) is ConcatDataset:
            raise self._recording.unread("several datasets one after another (`ConcatDataset`)")
        return self._run(self._lookup.special(dataset, "__getitem__"), [dataset, index], {})

    # -- functions -----------------------------------------------------------------------------------------------

    def _run(self, function: types.FunctionType, operands: list[Seen], keywords: dict[str, Seen]) -> Seen:
        recording, line = self._recording, self._recording.line
        try:
            definition = syntax_of(function.__code__)
        except NoSource as problem:
            raise recording.unread(f"`{function.__qualname__}`: {problem}") from None
        recording.functions.append(function)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise recording.unread(f"more than {MAX_DEPTH} calls deep")
        frame = Frame(function, self._bound(function, operands, keywords))
        try:
            self._all(definition.body, frame)
            return recording.constant(None)
        except _Returned as returned:
            return returned.seen
        finally:
            self._depth -= 1
            recording.line = line

    def _bound(self, function: types.FunctionType, operands: list[Seen], keywords: dict[str, Seen]) -> dict[str, Seen]:
        recording = self._recording
        try:
            bound = inspect.signature(function, follow_wrapped=False).bind(*operands, **keywords)
        except TypeError as problem:
            raise recording.unread(str(problem)) from None
        names: dict[str, Seen] = {}
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                names[name] = recording.structure(tuple(bound.arguments.get(name, ())))
            elif parameter.kind is parameter.VAR_KEYWORD:
                names[name] = recording.structure(dict(bound.arguments.get(name, {})))
            elif name in bound.arguments:
                names[name] = bound.arguments[name]
            else:
                names[name] = recording.constant(parameter.default)
        return names

    # -- statements ----------------------------------------------------------------------------------------------

    def _do(self, statement: ast.stmt, frame: Frame) -> None:
        recording = self._recording
        recording.line = f"{frame.file}:{statement.lineno}"
        match statement:
            case ast.Return(value=value):
                raise _Returned(recording.constant(None) if value is None else self._value(value, frame))
            case ast.Assign(targets=targets, value=value):
                seen = self._value(value, frame)
                for target in targets:
                    self._assign(target, seen, frame)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value, frame), frame)
            case ast.If(test=test, body=body, orelse=orelse):
                self._all(body if recording.truth(self._value(test, frame)) else orelse, frame)
            case ast.For(target=target, iter=over, body=body, orelse=[]):
                for seen in self._each(self._value(over, frame)):
                    self._assign(target, seen, frame)
                    self._all(body, frame)
            case ast.Assert(test=test):
                if not recording.truth(self._value(test, frame)):
                    raise recording.unread("an assertion fails")
            case ast.Expr(value=value):
                self._value(value, frame)
            case _:
                raise recording.unread(f"`{_first_words(statement)}`")

    def _all(self, statements: list[ast.stmt], frame: Frame) -> None:
        for statement in statements:
            if not isinstance(statement, ast.Pass):
                self._do(statement, frame)

    def _assign(self, target: ast.expr, seen: Seen, frame: Frame) -> None:
        match target:
            case ast.Name(id=name):
                frame.names[name] = seen
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = list(self._each(seen))
                if len(parts) != len(targets) or any(isinstance(one, ast.Starred) for one in targets):
                    raise self._recording.unread("an assignment to several names that does not come out even")
                for one, part in zip(targets, parts, strict=True):
                    self._assign(one, part, frame)
            case _:
                raise self._recording.unread("something is assigned to an attribute or an element")

    def _each(self, seen: Seen) -> list[Seen]:
        """The elements of what all items share, or of what was put together while reading."""
        recording = self._recording
        if seen.parts is not None and type(seen.parts) in (tuple, list):
            return list(seen.parts)
        if seen.varies or type(seen.value) not in (tuple, list, range):
            raise recording.unread("a loop over what differs from item to item, or is no list")
        if len(seen.value) > MAX_ROUNDS:
            raise recording.unread(f"a loop of more than {MAX_ROUNDS} rounds")
        recording.of_type(seen, type(seen.value))
        length = recording.apply(_LENGTH, [seen])
        same = operations.of_comparison(ast.Eq)
        assert same is not None
        recording.truth(recording.apply(same, [length, recording.constant(len(seen.value))]))
        return [
            recording.apply(operations.SUBSCRIPT, [seen, recording.constant(number)])
            for number in range(len(seen.value))
        ]

    # -- expressions ---------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, frame: Frame) -> Seen:
        reads = _EXPRESSIONS.get(type(node))
        if reads is None:
            raise self._recording.unread(f"`{_first_words(node)}`")
        return reads(self, node, frame)

    def _constant(self, node: ast.Constant, frame: Frame) -> Seen:
        return self._recording.constant(node.value)

    def _named(self, node: ast.Name, frame: Frame) -> Seen:
        return self._name(node.id, frame)

    def _sequence(self, node: ast.Tuple | ast.List, frame: Frame) -> Seen:
        parts = [self._value(element, frame) for element in node.elts]
        return self._recording.structure(tuple(parts) if isinstance(node, ast.Tuple) else parts)

    def _slice(self, node: ast.Slice, frame: Frame) -> Seen:
        ends = [node.lower, node.upper, node.step]
        nothing = self._recording.constant(None)
        return self._recording.apply(
            operations.SLICE, [nothing if end is None else self._value(end, frame) for end in ends]
        )

    def _operator(self, node: ast.BinOp, frame: Frame) -> Seen:
        return self._binary(node.op, self._value(node.left, frame), self._value(node.right, frame))

    def _sign(self, node: ast.UnaryOp, frame: Frame) -> Seen:
        recording, seen = self._recording, self._value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            return recording.constant(not recording.truth(seen))
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return recording.constant(-seen.value)
        raise recording.unread(f"`{_first_words(node)}`")

    def _one_or_other(self, node: ast.IfExp, frame: Frame) -> Seen:
        return self._value(node.body if self._recording.truth(self._value(node.test, frame)) else node.orelse, frame)

    def _name(self, name: str, frame: Frame) -> Seen:
        if name in frame.names:
            return frame.names[name]
        return self._lookup.name(frame.function, name)

    def _dictionary(self, node: ast.Dict, frame: Frame) -> Seen:
        parts = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise self._recording.unread("a dictionary whose keys are no constants")
            parts[key.value] = self._value(value, frame)
        return self._recording.structure(parts)

    def _comprehended(self, node: ast.GeneratorExp | ast.ListComp, frame: Frame) -> Seen:
        one = node.generators[0]
        if len(node.generators) > 1 or one.ifs or one.is_async:
            raise self._recording.unread("a comprehension with a condition, or over several")
        inner = Frame(frame.function, dict(frame.names))
        parts = []
        for seen in self._each(self._value(one.iter, frame)):
            self._assign(one.target, seen, inner)
            parts.append(self._value(node.elt, inner))
        return self._recording.structure(parts)

    def _either(self, node: ast.BoolOp, frame: Frame) -> Seen:
        for value in node.values[:-1]:
            seen = self._value(value, frame)
            if self._recording.truth(seen) is isinstance(node.op, ast.Or):
                return seen
        return self._value(node.values[-1], frame)

    def _compared(self, node: ast.Compare, frame: Frame) -> Seen:
        recording = self._recording
        if len(node.ops) > 1:
            raise recording.unread(f"`{_first_words(node)}`")
        op, left, right = node.ops[0], self._value(node.left, frame), self._value(node.comparators[0], frame)
        if isinstance(op, ast.Is | ast.IsNot) and (left.varies or right.varies):
            if left.value is not None and right.value is None and left.varies:  # what varies is a value of some kind
                return recording.constant(isinstance(op, ast.IsNot))
            raise recording.unread("a comparison by identity of what differs from item to item")
        operation = operations.of_comparison(type(op))
        if not isinstance(op, ast.Is | ast.IsNot) and not (self._simple(left) and self._simple(right)):
            raise recording.unread("a comparison of something else than numbers and text")
        if operation is None:
            raise recording.unread("a comparison that is not known")
        return recording.apply(operation, [left, right])

    def _simple(self, seen: Seen) -> bool:
        """Whether a comparison with it is Python's or NumPy's own."""
        kind = type(seen.value)
        if kind in (tuple, list) and not seen.varies:
            return all(type(one) in (int, float, str, bool) for one in seen.value)
        return kind in (int, float, str, bool, type(None), torch.dtype, torch.Size) or isinstance(
            seen.value, np.generic
        )

    def _binary(self, op: ast.operator, left: Seen, right: Seen) -> Seen:
        operation = operations.of_operator(type(op))
        if operation is None or not (self._lookup.known(left) and self._lookup.known(right)):
            raise self._recording.unread("an operator between values that are not known")
        return self._recording.apply(operation, [left, right])

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Seen:
        of, name = self._value(node.value, frame), node.attr
        operation = operations.of_attribute(type(of.value), name)
        if operation is not None:
            return self._recording.apply(operation, [of])
        found = self._lookup.attribute(of, name)
        if isinstance(found, types.FunctionType):  # a property, or a method that is not called
            raise self._recording.unread(f"the method `{name}` is passed on")
        if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
            return self._run(found.fget, [of], {})
        return found

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Seen:
        of, key = self._value(node.value, frame), self._value(node.slice, frame)
        if of.parts is not None and not key.varies and type(key.value) in (int, str):
            try:
                return of.parts[key.value]
            except (LookupError, TypeError):
                raise self._recording.unread("an element that is not there") from None
        if self._lookup.known(of) or type(of.value) in (list, tuple, dict, range):
            found = self._recording.apply(operations.SUBSCRIPT, [of, key])
            if found.varies and not self._lookup.known(found):
                raise self._recording.unread(f"an element of type `{type(found.value).__name__}`")
            self._recording.of_kind(found, of)
            return found
        return self.item(of, key)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _called(self, node: ast.Call, frame: Frame) -> Seen:
        recording, function, operands, keywords = self._recording, node.func, node.args, node.keywords
        if any(isinstance(one, ast.Starred) for one in operands) or any(one.arg is None for one in keywords):
            raise recording.unread("a call with `*` or `**`")
        given = [self._value(one, frame) for one in operands]
        named = {str(one.arg): self._value(one.value, frame) for one in keywords}
        if isinstance(function, ast.Attribute):
            of = self._value(function.value, frame)
            operation = operations.of_method(type(of.value), function.attr)
            if operation is not None:
                return recording.apply(operation, [of, *given], named)
            found = self._lookup.attribute(of, function.attr)
            if isinstance(found, types.FunctionType):
                return self._run(found, [of, *given], named)
            if isinstance(found, property):
                raise recording.unread("what a property gives is called")
            return self._call(found, given, named)
        return self._call(self._value(function, frame), given, named)

    def _call(self, callee: Seen, given: list[Seen], named: dict[str, Seen]) -> Seen:
        recording, value = self._recording, callee.value
        if callee.varies:
            raise recording.unread("what is called differs from item to item")
        answer = self._lookup.answered(value, given, named)
        if answer is not None:
            return answer
        operation = operations.of_function(value)
        if operation is not None:
            return recording.apply(operation, given, named)
        if isinstance(value, types.FunctionType):
            self._lookup.same(callee)
            return self._run(value, given, named)
        operation = operations.of_transform(value)
        if operation is not None:
            recording.of_type(callee, type(value))
            return recording.apply(operation, [callee, *given], named)
        chain = vision.as_read(value)
        if chain is not None:
            recording.of_type(callee, type(value))
            return self._run(chain, [callee, *given], named)
        random = random_transforms.of_transform(value)
        if random is not None and len(given) == 1 and not named:
            return recording.draw(callee, given[0], random)
        if value is len and len(given) == 1 and not given[0].varies:
            return self._run(self._lookup.special(given[0], "__len__"), given, {})
        if isinstance(value, type | types.BuiltinFunctionType | types.MethodType):
            raise recording.unread(f"`{value.__qualname__.replace('_VariableFunctionsClass', 'torch')}`")
        return self._run(self._lookup.special(callee, "__call__"), [callee, *given], named)


_EXPRESSIONS: dict[type[ast.expr], Callable[..., Seen]] = {
    ast.Constant: Reader._constant, ast.Name: Reader._named, ast.Tuple: Reader._sequence, ast.List: Reader._sequence,
    ast.Dict: Reader._dictionary, ast.Attribute: Reader._attribute, ast.Subscript: Reader._subscript,
    ast.Slice: Reader._slice, ast.BinOp: Reader._operator, ast.UnaryOp: Reader._sign, ast.BoolOp: Reader._either,
    ast.Compare: Reader._compared, ast.IfExp: Reader._one_or_other, ast.GeneratorExp: Reader._comprehended,
    ast.ListComp: Reader._comprehended, ast.Call: Reader._called,
}  # fmt: skip

_LENGTH = operations.Operation("len", len, len)


def _first_words(node: ast.AST) -> str:
    text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["Unread", "read"]
