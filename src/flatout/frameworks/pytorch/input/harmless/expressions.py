"""What may an expression be, and does computing it do any harm?

In: expressions of the script's code, and what is known of its names. Out: values.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.frameworks.pytorch.input.harmless.frames import Frame, LocalFunction
from flatout.frameworks.pytorch.input.harmless.resolving import (
    Property,
    Refused,
    gives_elements_simply,
    goes_on,
    is_of_library,
)
from flatout.frameworks.pytorch.input.harmless.values import (
    IMMUTABLE,
    OWN,
    SHARED,
    UNKNOWN,
    Value,
    either,
    joined,
    known,
)

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.harmless.walking import Walker

_SIMPLE = (bool, int, float, str, bytes, type(None))
"""Classes whose truth and comparisons are Python's."""


class Expressions:
    """Looks at expressions."""

    def __init__(self, walker: Walker) -> None:
        self._walker = walker

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """What an expression may be.

        Raises:
            Refused: Computing it may do harm.
        """
        looks = _EXPRESSIONS.get(type(node))
        if looks is None:
            raise Refused(f"`{ast.unparse(node)[:60]}`")
        try:
            found: Value = looks(self, node, frame)
            going_on = next((thing for thing in found.among or () if goes_on(type(thing))), None)
            if going_on is not None and not found.own:
                kind = type(going_on).__name__
                raise Refused(f"a generator of the script's own, or an iterator or a file: a `{kind}`")
        except Refused as problem:
            raise frame.refused(problem, node) from None
        return found

    def iterated(self, over: Value) -> Value:
        """What a loop over a value gives.

        Raises:
            Refused: It runs code that is not known.
        """
        if over.among is not None and any(not is_of_library(thing) for thing in over.among):
            raise Refused(f"a loop over a `{type(over.among[0]).__name__}`")
        self._walker.resolver.require_library(over)
        thing = over.sole()
        if isinstance(thing, dict) and over.each is None:
            return Value(own=True)
        return self._walker.resolver.element(over)

    def hold(self, base: ast.expr, value: Value, frame: Frame) -> None:
        """What `base` is holds this value from now on."""
        if isinstance(base, ast.Name) and base.id in frame.names:
            former = frame.names[base.id]
            self._walker.resolver.shares = self._walker.resolver.shares or not (value.own or _never_changes(value))
            each = value if former.parts == () else either(former.element(), value)
            frame.names[base.id] = Value(own=former.own, each=each)
        elif not value.own:
            raise Refused("something that is not the item's own is put into a part of a part")

    # -- truth ---------------------------------------------------------------------------------------------------

    def truth(self, node: ast.expr, frame: Frame) -> bool | None:
        """Whether a condition holds; None where that is not known beforehand.

        Raises:
            Refused: Computing it may do harm.
        """
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found = self.truth(operand, frame)
                return None if found is None else not found
            case ast.BoolOp(op=op, values=values):
                return self._either(isinstance(op, ast.Or), values, frame)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(op, self.value(left, frame), self.value(right, frame))
            case ast.Call(func=ast.Name(id="isinstance"), args=[thing, kind], keywords=[]):
                return _is_instance(self.value(thing, frame), self.value(kind, frame))
            case ast.Call(func=ast.Name(id="callable"), args=[thing], keywords=[]):
                sole = self.value(thing, frame).sole()
                return None if sole is UNKNOWN else callable(sole)
        return self.of_value(self.value(node, frame))

    def of_value(self, value: Value) -> bool | None:
        """Whether a value is true.

        Raises:
            Refused: It runs code that is not known.
        """
        thing = value.sole()
        for one in value.among or ():
            kind = type(one)
            if not is_of_library(one) and any(hasattr(kind, name) for name in ("__bool__", "__len__")):
                raise Refused(f"whether a `{kind.__name__}` is true")
        if thing is UNKNOWN:
            return None
        if isinstance(thing, _SIMPLE):
            return bool(thing)
        return None if any(hasattr(type(thing), name) for name in ("__bool__", "__len__")) else True

    def _either(self, is_or: bool, values: list[ast.expr], frame: Frame) -> bool | None:
        """Of `and` and `or`; operands behind one that decides are not looked at."""
        open_ = False
        for value in values:
            found = self.truth(value, frame)
            if found is is_or:
                return None if open_ else is_or
            open_ = open_ or found is None
        return None if open_ else not is_or

    def _compared(self, op: ast.cmpop, left: Value, right: Value) -> bool | None:
        one, other = left.sole(), right.sole()
        if isinstance(op, ast.Is | ast.IsNot):
            if one is UNKNOWN or other is UNKNOWN:
                return None
            return (one is other) is isinstance(op, ast.Is)
        for thing in (*(left.among or ()), *(right.among or ())):
            if not is_of_library(thing):
                raise Refused(f"a comparison of a `{type(thing).__name__}`")
        if not isinstance(one, _SIMPLE) or not _is_simple(other):
            return None
        try:
            return _COMPARISONS[type(op)](one, other)
        except (KeyError, TypeError):
            return None

    # -- names, attributes, elements -----------------------------------------------------------------------------

    def _constant(self, node: ast.Constant, frame: Frame) -> Value:
        return known(node.value, own=True)

    def _name(self, node: ast.Name, frame: Frame) -> Value:
        if node.id in frame.names:
            return frame.names[node.id]
        code = frame.function.__code__
        if node.id in (*code.co_varnames, *code.co_cellvars):
            return SHARED
        return self._walker.resolver.name(frame.function, node.id)

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Value:
        return self.attribute(self.value(node.value, frame), node.attr)

    def attribute(self, of: Value, name: str) -> Value:
        """What an attribute may be, which may be a property.

        Raises:
            Refused: Reading it may do harm.
        """
        found = self._walker.resolver.attribute(of, name)
        if not any(isinstance(thing, Property) for thing in found.among or ()):
            return found
        return joined(
            [
                self._walker.run(thing.function, [known(thing.thing)], {})
                if isinstance(thing, Property)
                else known(thing)
                for thing in found.among or ()
            ]
        )

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Value:
        of, key = self.value(node.value, frame), self.value(node.slice, frame)
        if _is_sliced(node.slice):
            return Value(own=of.own, each=self._sliced(of))
        place = key.sole()
        if of.parts is not None and type(place) is int and -len(of.parts) <= place < len(of.parts):
            return of.parts[place]
        thing = of.sole()
        for kind in (*map(type, of.among or ()), *(of.kinds or ())):
            if issubclass(kind, list | tuple | dict) and not gives_elements_simply(kind):
                raise Refused(f"an element of a `{kind.__name__}`")
        if isinstance(thing, list | tuple | dict) and isinstance(place, _SIMPLE):
            return self._exact(thing, place, of)
        self._walker.resolver.require_library(of)
        found = []
        for one in of.among or ():
            if is_of_library(one):
                found.append(self._walker.resolver.element(Value((one,), own=of.own)))
            else:
                found.append(self._walker.item(known(one), key))
        return joined(found) if found and of.each is None else self._walker.resolver.element(of)

    def _sliced(self, of: Value) -> Value | None:
        if of.among is None and of.each is None and of.parts is None:
            return None
        return self._walker.resolver.element(of)

    def _exact(self, thing: Any, place: Any, of: Value) -> Value:
        """A certain element of what is known."""
        if isinstance(thing, dict):
            if place not in thing:
                return SHARED
            self._walker.guards.name(thing, place, thing[place])
            return known(thing[place])
        parts = self._walker.resolver.elements(of)
        if parts is None or type(place) is not int or not -len(parts) <= place < len(parts):
            return self._walker.resolver.element(of)
        return parts[place]

    def _slice(self, node: ast.Slice, frame: Frame) -> Value:
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                self.value(part, frame)
        return OWN

    # -- put together --------------------------------------------------------------------------------------------

    def _tuple(self, node: ast.Tuple, frame: Frame) -> Value:
        values = [self.value(one, frame) for one in node.elts]
        if any(isinstance(one, ast.Starred) for one in node.elts):
            return Value(own=True, each=joined(values) if values else OWN)
        return Value(own=True, parts=tuple(values))

    def _starred(self, node: ast.Starred, frame: Frame) -> Value:
        return self._walker.resolver.element(self.value(node.value, frame))

    def _dictionary(self, node: ast.Dict, frame: Frame) -> Value:
        for key in node.keys:
            if key is not None:
                self.value(key, frame)
        values = [self.value(one, frame) for one in node.values]
        return Value(own=True, each=joined(values)) if values else Value(own=True, parts=())

    def _comprehended(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: Frame) -> Value:
        before = dict(frame.names)
        found = self._of_generators(node, list(node.generators), frame)
        frame.names = before
        return Value(own=True, each=joined(found) if found else OWN)

    def _of_generators(self, node: Any, generators: list[ast.comprehension], frame: Frame) -> list[Value]:
        if not generators:
            if isinstance(node, ast.DictComp):
                self.value(node.key, frame)
                return [self.value(node.value, frame)]
            return [self.value(node.elt, frame)]
        first, found = generators[0], []
        over = self.value(first.iter, frame)
        for part in self._walker.resolver.elements(over) or [self.iterated(over)]:
            self._walker.assign(first.target, part, frame)
            if all(self.truth(test, frame) is not False for test in first.ifs):
                found += self._of_generators(node, generators[1:], frame)
        return found

    def _text(self, node: ast.JoinedStr, frame: Frame) -> Value:
        for part in node.values:
            self.value(part, frame)
        return OWN

    def _formatted(self, node: ast.FormattedValue, frame: Frame) -> Value:
        value = self.value(node.value, frame)
        for thing in value.among or ():
            if not is_of_library(thing):
                raise Refused(f"a `{type(thing).__name__}` as text")
        return OWN

    # -- operators -----------------------------------------------------------------------------------------------

    def _operator(self, node: ast.BinOp, frame: Frame) -> Value:
        left, right = self.value(node.left, frame), self.value(node.right, frame)
        for thing in (*(left.among or ()), *(right.among or ())):
            if not is_of_library(thing):
                raise Refused(f"an operator on a `{type(thing).__name__}`")
        return Value(own=True, each=either(left.element(), right.element()))

    def _sign(self, node: ast.UnaryOp, frame: Frame) -> Value:
        if isinstance(node.op, ast.Not):
            found = self.truth(node.operand, frame)
            return OWN if found is None else known(not found)
        value = self.value(node.operand, frame)
        thing = value.sole()
        if type(thing) in (int, float) and isinstance(node.op, ast.USub):
            return known(-thing)
        for one in value.among or ():
            if not is_of_library(one):
                raise Refused(f"an operator on a `{type(one).__name__}`")
        return OWN

    def _comparison(self, node: ast.Compare, frame: Frame) -> Value:
        found = self.truth(node, frame) if len(node.ops) == 1 else None
        if len(node.ops) > 1:
            left = self.value(node.left, frame)
            for op, comparator in zip(node.ops, node.comparators, strict=True):
                right = self.value(comparator, frame)
                self._compared(op, left, right)
                left = right
        return OWN if found is None else known(found)

    def _logic(self, node: ast.BoolOp, frame: Frame) -> Value:
        return joined([self.value(one, frame) for one in node.values])

    def _one_or_other(self, node: ast.IfExp, frame: Frame) -> Value:
        truth = self.truth(node.test, frame)
        if truth is not None:
            return self.value(node.body if truth else node.orelse, frame)
        return either(self.value(node.body, frame), self.value(node.orelse, frame))

    def _named(self, node: ast.NamedExpr, frame: Frame) -> Value:
        value = self.value(node.value, frame)
        self._walker.assign(node.target, value, frame)
        return value

    def _lambda(self, node: ast.Lambda, frame: Frame) -> Value:
        body: list[ast.stmt] = [ast.copy_location(ast.Return(value=node.body), node.body)]
        return known(LocalFunction(node.args, body, frame), own=True)

    def _call(self, node: ast.Call, frame: Frame) -> Value:
        return self._walker.calls.call(node, frame)


def _is_sliced(key: ast.expr) -> bool:
    """Whether an index takes a part of a list, or of an array."""
    parts = key.elts if isinstance(key, ast.Tuple) else [key]
    return any(isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and part.value is ...) for part in parts)


def _never_changes(value: Value) -> bool:
    return value.kinds is not None and all(issubclass(kind, IMMUTABLE) for kind in value.kinds)


def _is_simple(thing: Any) -> bool:
    if isinstance(thing, tuple | list | set | frozenset):
        return all(isinstance(one, _SIMPLE) for one in thing)
    return isinstance(thing, _SIMPLE)


def _is_instance(value: Value, kinds: Value) -> bool | None:
    parts = [part.sole() for part in kinds.parts] if kinds.parts is not None else [kinds.sole()]
    wanted = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    if any(type(one) is not type for one in wanted):  # others answer in their own way
        return None
    if value.among is not None:
        found = {isinstance(thing, tuple(wanted)) for thing in value.among}
    elif value.kinds is not None:
        found = {issubclass(kind, tuple(wanted)) for kind in value.kinds}
    else:
        return None
    return found.pop() if len(found) == 1 else None


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip

_EXPRESSIONS: dict[type[ast.expr], Any] = {
    ast.Constant: Expressions._constant, ast.Name: Expressions._name, ast.Attribute: Expressions._attribute,
    ast.Subscript: Expressions._subscript, ast.Slice: Expressions._slice, ast.Tuple: Expressions._tuple,
    ast.List: Expressions._tuple, ast.Set: Expressions._tuple, ast.Starred: Expressions._starred,
    ast.Dict: Expressions._dictionary, ast.ListComp: Expressions._comprehended, ast.SetComp: Expressions._comprehended,
    ast.GeneratorExp: Expressions._comprehended, ast.DictComp: Expressions._comprehended,
    ast.JoinedStr: Expressions._text, ast.FormattedValue: Expressions._formatted, ast.BinOp: Expressions._operator,
    ast.UnaryOp: Expressions._sign, ast.Compare: Expressions._comparison, ast.BoolOp: Expressions._logic,
    ast.IfExp: Expressions._one_or_other, ast.NamedExpr: Expressions._named, ast.Lambda: Expressions._lambda,
    ast.Call: Expressions._call,
}  # fmt: skip
