"""Does it do any harm to run a dataset's code for an item once more? Its statements are looked at, one after another.

Harm is what shows outside the item: an attribute, a global or an element of something that is not the item's own is
assigned, something is printed or written, numbers are drawn from a generator that only the script has, or a function is
called that is not known. Every branch is looked at that may be taken. In: a dataset. Out: guards; or what is not known
to be harmless, and where it stands.
"""

from __future__ import annotations

import ast
import sys
import types
from dataclasses import dataclass
from typing import Any

from flatout.frameworks.pytorch.input.harmless.calls import Calls
from flatout.frameworks.pytorch.input.harmless.expressions import Expressions
from flatout.frameworks.pytorch.input.harmless.frames import Frame, LocalFunction
from flatout.frameworks.pytorch.input.harmless.guards import Guards
from flatout.frameworks.pytorch.input.harmless.resolving import Refused, Resolver
from flatout.frameworks.pytorch.input.harmless.values import IMMUTABLE, OWN, SHARED, Value, either, known, same
from flatout.frameworks.pytorch.input.items.syntax import NoSource, body_of

MOST_STATEMENTS = 20_000
MOST_DEPTH = 30
MOST_ROUNDS = 5
"""How often the body of a loop is looked at until nothing new is found."""


@dataclass(frozen=True, slots=True)
class Harmless:
    """What was found about a dataset's code.

    Attributes:
        guards: What has to stay as it is.
        straight: Functions in which arrays of images are made for `torch.from_numpy` and for nothing else.
    """

    guards: Guards
    straight: frozenset[types.CodeType]


def look_at(dataset: Any) -> Harmless:
    """See that the code of `dataset[index]` does no harm when it is run once more, and opens an image.

    Raises:
        Refused: Says what may do harm, and where it stands.
    """
    walker = Walker()
    walker.item(known(dataset), Value(own=True, kinds=frozenset((int,))))
    if not walker.calls.opens_images:
        raise Refused("no image is opened in a way that is known")
    return Harmless(walker.guards, walker.calls.straight())


class Walker:
    """Looks at functions."""

    def __init__(self) -> None:
        self.guards = Guards()
        self.resolver = Resolver(self.guards)
        self.calls = Calls(self)
        self.expressions = Expressions(self)
        self._under_way: list[tuple[types.CodeType, int]] = []
        self._num_statements = 0

    def item(self, of: Value, index: Value) -> Value:
        """`of[index]` of objects of the script's own."""
        found = [self.run(self.resolver.method(thing, "__getitem__"), [index], {}) for thing in of.among or ()]
        if not found:
            raise Refused("an element of something that is not known")
        result = found[0]
        for value in found[1:]:
            result = either(result, value)
        return result

    # -- functions -----------------------------------------------------------------------------------------------

    def run(self, function: Any, operands: list[Value], keywords: dict[str, Value]) -> Value:
        """What a function of the script's gives, or a method of one of its objects.

        Raises:
            Refused: It may do harm.
        """
        if isinstance(function, types.MethodType):
            operands = [known(function.__self__), *operands]
            function = function.__func__
        if isinstance(function, LocalFunction):
            frame = Frame(function.frame.function, dict(function.frame.names), function.frame.owner)
            arguments, body = function.arguments, function.body
        else:
            try:
                arguments, body = body_of(function.__code__)
            except NoSource as problem:
                raise Refused(f"`{function.__qualname__}`: {problem}") from None
            self.guards.code(function)
            frame = Frame(function, {}, _owner(function, operands))
        mark = (function.__code__ if isinstance(function, types.FunctionType) else id(function), _identity(operands))
        if mark in self._under_way:
            return SHARED
        if len(self._under_way) >= MOST_DEPTH:
            raise Refused(f"more than {MOST_DEPTH} calls deep")
        self._under_way.append(mark)  # type: ignore[arg-type]
        try:
            self._bind(frame, function, arguments, operands, keywords)
            self._all(body, frame)
        finally:
            self._under_way.pop()
        return known(None) if frame.returned is None else frame.returned

    def _bind(
        self, frame: Frame, function: Any, arguments: ast.arguments, operands: list[Value], keywords: dict[str, Value]
    ) -> None:
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        defaults = _defaults(function, names)
        for name in (*names, *(one.arg for one in arguments.kwonlyargs)):
            frame.names[name] = keywords.get(name, defaults.get(name, SHARED))
        for name, value in zip(names, operands, strict=False):
            frame.names[name] = value
        if arguments.vararg is not None:
            frame.names[arguments.vararg.arg] = Value(own=True, parts=tuple(operands[len(names) :]))
        if arguments.kwarg is not None:
            frame.names[arguments.kwarg.arg] = Value(own=True, each=SHARED)

    # -- statements ----------------------------------------------------------------------------------------------

    def _all(self, statements: list[ast.stmt], frame: Frame) -> None:
        for statement in statements:
            self._num_statements += 1
            if self._num_statements > MOST_STATEMENTS:
                raise Refused("there is too much code to look at")
            try:
                self._do(statement, frame)
            except Refused as problem:
                raise frame.refused(problem, statement) from None

    def _do(self, statement: ast.stmt, frame: Frame) -> None:
        does = _STATEMENTS.get(type(statement))
        if does is None:
            raise Refused(f"`{ast.unparse(statement).splitlines()[0][:60]}`")
        does(self, statement, frame)

    def _value(self, node: ast.expr, frame: Frame) -> Value:
        return self.expressions.value(node, frame)

    def _expression(self, statement: ast.Expr, frame: Frame) -> None:
        self._value(statement.value, frame)

    def _nothing(self, statement: ast.stmt, frame: Frame) -> None:
        return

    def _return(self, statement: ast.Return, frame: Frame) -> None:
        value = known(None) if statement.value is None else self._value(statement.value, frame)
        frame.returned = value if frame.returned is None else either(frame.returned, value)

    def _assign(self, statement: ast.Assign, frame: Frame) -> None:
        value = self._value(statement.value, frame)
        for target in statement.targets:
            self.assign(target, value, frame)

    def _assign_annotated(self, statement: ast.AnnAssign, frame: Frame) -> None:
        if statement.value is not None:
            self.assign(statement.target, self._value(statement.value, frame), frame)

    def _change(self, statement: ast.AugAssign, frame: Frame) -> None:
        """`x += y`, which changes lists and arrays in place."""
        value, target = self._value(statement.value, frame), statement.target
        former = self._value(_loaded(target), frame)
        simple = former.among is not None and all(isinstance(thing, IMMUTABLE) for thing in former.among)
        if not former.own and not simple:
            raise Refused("something that is not the item's own is changed in place")
        self.assign(target, Value(own=True, each=either(former.element(), value.element())), frame)

    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """A name, names, or an element of something that is the item's own."""
        match target:
            case ast.Name(id=name):
                frame.names[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = self.resolver.elements(value)
                starred = any(isinstance(one, ast.Starred) for one in targets)
                for place, one in enumerate(targets):
                    exact = parts is not None and len(parts) == len(targets) and not starred
                    part = parts[place] if exact and parts is not None else self.resolver.element(value)
                    self.assign(one, part, frame)
            case ast.Starred(value=one):
                self.assign(one, Value(own=True, each=value), frame)
            case ast.Subscript(value=base, slice=key):
                self._value(key, frame)
                self._put(base, value, frame)
            case _:
                raise Refused("an attribute is assigned")

    def _put(self, base: ast.expr, value: Value, frame: Frame) -> None:
        """An element is assigned."""
        container = self._value(base, frame)
        if not container.own:
            raise Refused("an element of something that is not the item's own is assigned")
        self.expressions.hold(base, value, frame)

    def _if(self, statement: ast.If, frame: Frame) -> None:
        truth = self.expressions.truth(statement.test, frame)
        before = dict(frame.names)
        if truth is not False:
            self._all(statement.body, frame)
        after, frame.names = frame.names, before
        if truth is not True:
            self._all(statement.orelse, frame)
        if truth is None:
            frame.merge(after)
        elif truth:
            frame.names = after

    def _for(self, statement: ast.For, frame: Frame) -> None:
        over = self._value(statement.iter, frame)
        parts = self.resolver.elements(over)
        if parts is not None:
            before = dict(frame.names)
            for part in parts:
                self.assign(statement.target, part, frame)
                self._all(statement.body, frame)
            frame.merge(before)
        else:
            self._repeat(statement, frame, self.expressions.iterated(over))
        self._all(statement.orelse, frame)

    def _while(self, statement: ast.While, frame: Frame) -> None:
        self._repeat(statement, frame, None)
        self._all(statement.orelse, frame)

    def _repeat(self, loop: ast.For | ast.While, frame: Frame, part: Value | None) -> None:
        """The body of a loop, until another round finds nothing new."""
        for _ in range(MOST_ROUNDS):
            before = dict(frame.names)
            if isinstance(loop, ast.While):
                self._value(loop.test, frame)
            elif part is not None:
                self.assign(loop.target, part, frame)
            self._all(loop.body, frame)
            frame.merge(before)
            if before.keys() == frame.names.keys() and all(same(before[name], frame.names[name]) for name in before):
                return
        raise Refused("a loop in which something new is found each time")

    def _with(self, statement: ast.With, frame: Frame) -> None:
        for item in statement.items:
            value = self._value(item.context_expr, frame)
            if not value.own:
                raise Refused("`with` of something that is not the item's own")
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Value(own=True), frame)
        self._all(statement.body, frame)

    def _try(self, statement: ast.Try, frame: Frame) -> None:
        before = dict(frame.names)
        self._all(statement.body, frame)
        frame.merge(before)
        self._all(statement.orelse, frame)
        for handler in statement.handlers:
            inner = dict(frame.names)
            if handler.type is not None:
                self._value(handler.type, frame)
            if handler.name is not None:
                frame.names[handler.name] = OWN
            self._all(handler.body, frame)
            frame.merge(inner)
        self._all(statement.finalbody, frame)

    def _raise(self, statement: ast.Raise, frame: Frame) -> None:
        for part in (statement.exc, statement.cause):
            if part is not None:
                self._value(part, frame)

    def _assert(self, statement: ast.Assert, frame: Frame) -> None:
        self._value(statement.test, frame)

    def _delete(self, statement: ast.Delete, frame: Frame) -> None:
        for target in statement.targets:
            if not isinstance(target, ast.Name):
                raise Refused("something else than a name is deleted")
            frame.names.pop(target.id, None)

    def _import(self, statement: ast.Import, frame: Frame) -> None:
        for alias in statement.names:
            if alias.name not in sys.modules:
                raise Refused(f"`{alias.name}` is imported")
            shown = alias.name if alias.asname else alias.name.split(".")[0]
            frame.names[alias.asname or shown] = known(sys.modules[shown])

    def _import_from(self, statement: ast.ImportFrom, frame: Frame) -> None:
        module = sys.modules.get(statement.module or "") if not statement.level else None
        if module is None:
            raise Refused(f"`{statement.module}` is imported")
        for alias in statement.names:
            frame.names[alias.asname or alias.name] = self.resolver.attribute(known(module), alias.name)

    def _define(self, statement: ast.FunctionDef, frame: Frame) -> None:
        if statement.decorator_list:
            raise Refused("a function with a decorator is defined")
        frame.names[statement.name] = known(LocalFunction(statement.args, statement.body, frame), own=True)


def _loaded(target: ast.expr) -> ast.expr:
    """The same expression as one that is read."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _identity(operands: list[Value]) -> int:
    return id(operands[0].sole()) if operands else 0


def _defaults(function: Any, names: list[str]) -> dict[str, Value]:
    if isinstance(function, LocalFunction):
        return {}
    values = function.__defaults__ or ()
    found = dict(zip(names[len(names) - len(values) :], map(known, values), strict=True)) if values else {}
    return {**found, **{name: known(value) for name, value in (function.__kwdefaults__ or {}).items()}}


def _owner(function: types.FunctionType, operands: list[Value]) -> type | None:
    """The class in which a method is defined."""
    kind = type(operands[0].sole()) if operands else object
    return next((one for one in kind.__mro__ if any(part is function for part in vars(one).values())), None)


_STATEMENTS: dict[type[ast.stmt], Any] = {
    ast.Expr: Walker._expression, ast.Pass: Walker._nothing, ast.Break: Walker._nothing, ast.Continue: Walker._nothing,
    ast.Return: Walker._return, ast.Assign: Walker._assign, ast.AnnAssign: Walker._assign_annotated,
    ast.AugAssign: Walker._change, ast.If: Walker._if, ast.For: Walker._for, ast.While: Walker._while,
    ast.With: Walker._with, ast.Try: Walker._try, ast.Raise: Walker._raise, ast.Assert: Walker._assert,
    ast.Delete: Walker._delete, ast.Import: Walker._import, ast.ImportFrom: Walker._import_from,
    ast.FunctionDef: Walker._define,
}  # fmt: skip
