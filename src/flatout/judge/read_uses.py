"""What becomes of a value that a line reads? Whether it is only printed, so that it could as well be read later.

In: the source of a file, and where in it the value is read. Out: a `Use`. Followed are the expression that reads and
the names that it is given within one function, in no order; a use that is not plainly one or the other is *not told*.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flatout.judge.printing_calls import MAKES_NEW, PASSING_METHODS, dotted, kind_of

Kind = Literal["printed", "unused", "used", "not told"]

Span: TypeAlias = tuple[int, int, int, int]
"""First and last line, counted from 1; first column and the column behind the last, in bytes."""

GIVES_VALUE = ("item", "tolist", "numpy", "cpu", "to")
"""Calls whose result is the value; other reads are made by whatever is given the tensor."""

SIZED = ("nonzero", "masked_select")
"""Calls whose result has as many elements as the values say, so that nothing can go on without them."""

LOOKS_AROUND = frozenset(("locals", "globals", "vars", "eval", "exec"))
"""Where these are called, a name may be read without being written."""

PRINTERS = ("rich", "pprint")
"""Modules whose `print` and `pprint` print."""

Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

_THROUGH = (
    ast.FormattedValue, ast.JoinedStr, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Tuple, ast.List, ast.Set, ast.Dict,
    ast.Starred, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp,
)  # fmt: skip
"""What holds a value that one of its parts has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What becomes of a value.

    Attributes:
        kind: `printed` (or logged, and nothing else), `unused` (by nothing at all), `used`, or `not told`.
        why: What shows that, in a few words.
        code: The expression that reads, as it is written; empty where the source does not show it.
    """

    kind: Kind
    why: str = ""
    code: str = ""


class Source:
    """One file of a script, to be asked of its lines.

    Raises:
        SyntaxError: It is no Python of this version.
        ValueError: It holds what no source may.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self._above: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self._tree):
            for child in ast.iter_child_nodes(node):
                self._above[child] = node

    def line(self, number: int) -> str:
        """A line without its indentation; empty where there is none."""
        return self._lines[number - 1].strip() if 0 < number <= len(self._lines) else ""

    def use(self, span: Span, *, read: str, within: bool) -> Use:
        r"""What becomes of the value that is read there.

        Args:
            span: The expression that reads.
            read: The method of the tensor that was called for it.
            within: Whether the reading is done within a library that the expression calls.

        >>> source = Source("value = loss.item()\nprint(value)")
        >>> source.use((1, 1, 8, 19), read="item", within=False)
        Use(kind='printed', why='', code='loss.item()')
        """
        node = self._at(span)
        if node is None:
            return Use(kind="not told", why="the source is not what ran")
        kind, why = _judged(_Flow(self._tree, self._above).of_read(node, read, within=within))
        return Use(kind=kind, why=why, code=ast.get_source_segment(self._text, node) or "")

    def _at(self, span: Span) -> ast.expr | ast.stmt | None:
        """The outermost expression that is just there, else the statement."""
        found: ast.expr | ast.stmt | None = None
        for node in ast.walk(self._tree):  # from the outermost inwards
            if isinstance(node, ast.expr | ast.stmt) and span in _spans(node):
                if isinstance(node, ast.expr):
                    return node
                found = found or node
        return found


Found: TypeAlias = tuple[Kind, str]


def _judged(found: list[Found]) -> Found:
    """What counts of several uses: one that needs the value, else one that nobody can tell."""
    for kind in ("used", "not told", "printed"):
        for one in found:
            if one[0] == kind:
                return one
    return "unused", "nothing takes it"


def _spans(node: ast.expr | ast.stmt) -> list[Span]:
    """Where a node stands, as Python's instructions say it: a method's call over several lines from its name on."""
    end, end_column = node.end_lineno or 0, node.end_col_offset or 0
    found = [(node.lineno, end, node.col_offset, end_column)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func
        found.append((name.end_lineno or 0, end, (name.end_col_offset or 0) - len(name.attr.encode()), end_column))
    return found


class _Flow:
    """Follows one value from where it is read to wherever it goes."""

    def __init__(self, tree: ast.Module, above: dict[ast.AST, ast.AST]) -> None:
        self._tree = tree
        self._above = above
        self._found: list[Found] = []
        self._named: set[tuple[Scope, str]] = set()

    def of_read(self, node: ast.expr | ast.stmt, read: str, *, within: bool) -> list[Found]:
        """Every use that the value has."""
        if read == "synchronize":
            self._not_told("it reads no value, but a clock may need the wait")
        elif read in SIZED:
            self._used("says how many elements there are", node)
        elif within:
            prints = isinstance(node, ast.Call) and self._kind(node) == "prints"
            self._found.append(("printed", "") if prints else ("not told", f"read within `{_name(node)}`"))
        elif read in GIVES_VALUE:
            own = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == read
            self._value(node) if own else self._argument(node)
        elif isinstance(node, ast.Call):
            self._argument(node)
        elif read in ("__bool__", "__index__") and not isinstance(node, ast.UnaryOp):
            self._used("steers" if read == "__bool__" else "is an index", node)
        elif isinstance(node, ast.BinOp | ast.UnaryOp | ast.JoinedStr | ast.FormattedValue):
            self._value(node)
        else:
            self._not_told(f"what line {node.lineno} does with it")
        return self._found

    def _used(self, how: str, node: ast.AST) -> None:
        self._found.append(("used", f"{how}, line {getattr(node, 'lineno', 0)}"))

    def _not_told(self, why: str) -> None:
        self._found.append(("not told", why))

    # -- upwards: what is made of the expression -----------------------------------------------------------------

    def _value(self, node: ast.AST) -> None:
        """An expression has the value: what is made of it?"""
        above = self._above[node]
        if isinstance(above, ast.keyword):
            node, above = above, self._above[above]
        if isinstance(above, _THROUGH):
            self._value(above)
        elif isinstance(above, ast.Call):
            self._argument(above)
        elif isinstance(above, ast.Attribute):
            self._attribute(above)
        elif isinstance(above, ast.Expr):
            return
        elif isinstance(above, ast.NamedExpr):
            self._target(above.target)
            self._value(above)
        elif isinstance(above, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assigned(node, above)
        else:
            self._steered(node, above)

    def _steered(self, node: ast.AST, above: ast.AST) -> None:
        """What may hang on it, or hand it on."""
        if isinstance(above, ast.If | ast.While | ast.Assert | ast.IfExp) and node is above.test:
            self._used(f"steers `{_WORDS[type(above)]}`", above)
        elif isinstance(above, ast.Match | ast.match_case):
            self._used("steers `match`", node)
        elif isinstance(above, ast.IfExp):
            self._value(above)
        elif isinstance(above, ast.BoolOp):
            last = node is above.values[-1]
            self._value(above) if last else self._used("steers `and` or `or`", above)
        elif isinstance(above, ast.Subscript) and node is above.value:
            if isinstance(above.ctx, ast.Load):  # else something is put into a container of values, or taken out
                self._value(above)
        elif isinstance(above, ast.Subscript | ast.Slice) and node is not getattr(above, "value", None):
            self._used("is an index", node)
        elif isinstance(above, ast.comprehension):
            self._comprehended(node, above)
        elif isinstance(above, ast.For | ast.AsyncFor) and node is above.iter:
            self._target(above.target)
        elif isinstance(above, ast.Return | ast.Yield | ast.YieldFrom | ast.Lambda):
            self._not_told(f"it is returned, line {getattr(node, 'lineno', 0)}")
        else:
            self._not_told(f"what line {getattr(node, 'lineno', 0)} does with it")

    def _comprehended(self, node: ast.AST, loop: ast.comprehension) -> None:
        if node is not loop.iter:
            self._used("chooses", node)
            return
        self._target(loop.target)

    def _attribute(self, above: ast.Attribute) -> None:
        call = self._above[above]
        if not (isinstance(call, ast.Call) and call.func is above):
            self._not_told(f"its `.{above.attr}`, line {above.lineno}")
        elif above.attr in PASSING_METHODS:
            self._value(call)
        elif not (kind_of(call) == "keeps" and isinstance(self._above[call], ast.Expr)):
            self._not_told(f"its `.{above.attr}()`, line {above.lineno}")

    def _argument(self, call: ast.expr | ast.stmt) -> None:
        """It is an argument of a call."""
        if not isinstance(call, ast.Call):
            self._not_told(f"what line {call.lineno} does with it")
            return
        kind = self._kind(call)
        if kind == "prints":
            self._found.append(("printed", ""))
        elif kind == "passes":
            self._value(call)
        elif kind == "steers":
            self._used("steers `range`", call)
        elif (container := self._container(call)) is not None:
            self._kept(container)
        else:
            self._not_told(f"what `{_name(call)}`, line {call.lineno}, does with it")

    def _container(self, call: ast.Call) -> ast.Name | None:
        """The name of what keeps the argument of a call, where the call is for nothing else."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        keeps = kind_of(call) == "keeps" and isinstance(self._above[call], ast.Expr)
        return owner if keeps and isinstance(owner, ast.Name) else None

    def _kind(self, call: ast.Call) -> str:
        """What the call does, unless the file has another meaning for its name."""
        name = dotted(call.func).partition(".")[0]
        return "unknown" if isinstance(call.func, ast.Name) and self._is_bound(name) else kind_of(call)

    def _is_bound(self, name: str) -> bool:
        """Whether the file gives a builtin's name to something else."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
                return True
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return True
            if isinstance(node, ast.arg) and node.arg == name:
                return True
            imported = node.names if isinstance(node, ast.ImportFrom) and node.module not in PRINTERS else []
            if name in {alias.asname or alias.name for alias in imported}:
                return True
        return False

    # -- along: where the names go that it is given ----------------------------------------------------------------

    def _assigned(self, node: ast.AST, above: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        if isinstance(above, ast.AugAssign):
            if isinstance(above.target, ast.Name):
                self._kept(above.target)
            else:
                self._into(above.target)
            return
        for target in above.targets if isinstance(above, ast.Assign) else [above.target]:
            self._target(target)

    def _target(self, target: ast.expr) -> None:
        """Something is assigned the value, or a part of it."""
        if isinstance(target, ast.Name):
            self._follow(target)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._target(one)
        elif isinstance(target, ast.Starred):
            self._target(target.value)
        else:
            self._into(target)

    def _into(self, target: ast.expr) -> None:
        """It becomes part of something: of a container that is this function's own, or of who knows what."""
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self._kept(target.value)
        else:
            self._not_told(f"who reads `{ast.unparse(target)}`, line {target.lineno}")

    def _kept(self, name: ast.Name) -> None:
        """Something that goes by this name holds it; others may hold the same thing under names of their own."""
        scope = self._scope(name)
        bindings = list(self._bindings(name.id, scope))
        if not bindings or not all(value is not None and _is_new(value) for value in bindings):
            self._not_told(f"who else has `{name.id}`, line {name.lineno}")
        else:
            self._follow(name)

    def _bindings(self, name: str, scope: Scope) -> Iterator[ast.expr | None]:
        """What the name is bound to in its scope, in so many words; None where it is by other means."""
        if not isinstance(scope, ast.Module | ast.ClassDef):
            arguments = scope.args
            known = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            if any(one is not None and one.arg == name for one in known):
                yield None
        for node in self._inside(scope):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
                yield from self._bound_by(node)

    def _bound_by(self, name: ast.Name) -> Iterator[ast.expr | None]:
        above = self._above[name]
        if isinstance(above, ast.AugAssign):
            return
        if isinstance(above, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            yield above.value
            return
        line = self._above[above]
        values = line.value.elts if isinstance(line, ast.Assign) and isinstance(line.value, ast.Tuple) else []
        alike = isinstance(above, ast.Tuple) and len(above.elts) == len(values)
        yield values[above.elts.index(name)] if isinstance(above, ast.Tuple) and alike else None

    def _follow(self, name: ast.Name) -> None:
        """Every place of the function that reads the name has the value."""
        scope = self._scope(name)
        if (scope, name.id) in self._named:
            return
        self._named.add((scope, name.id))
        if isinstance(scope, ast.ClassDef):
            self._not_told(f"who reads `{name.id}` of the class")
            return
        for node in self._inside(scope):
            if isinstance(node, ast.Global | ast.Nonlocal) and name.id in node.names:
                self._not_told(f"who else reads `{name.id}`")
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                if node.id in LOOKS_AROUND:
                    self._not_told(f"what `{node.id}`, line {node.lineno}, does with it")
                if node.id == name.id:
                    self._value(node)
            if isinstance(node, _SCOPES) and _reads(node, name.id):
                self._not_told(f"what another function, line {node.lineno}, does with `{name.id}`")

    def _inside(self, scope: Scope) -> Iterator[ast.AST]:
        """What stands in a scope itself, and the heads of the scopes in it."""
        waiting: list[ast.AST] = list(scope.body) if isinstance(scope.body, list) else [scope.body]
        while waiting:
            node = waiting.pop(0)
            yield node
            if not isinstance(node, _SCOPES):
                waiting = [*ast.iter_child_nodes(node), *waiting]

    def _scope(self, node: ast.AST) -> Scope:
        while not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            node = self._above[node]
        return node


_WORDS = {ast.If: "if", ast.While: "while", ast.Assert: "assert", ast.IfExp: "if"}


def _is_new(value: ast.expr) -> bool:
    """Whether an expression makes something that nobody else holds."""
    if isinstance(value, ast.Call):
        method = value.func.attr if isinstance(value.func, ast.Attribute) else ""
        return dotted(value.func) in MAKES_NEW or method in ("item", "tolist")
    new = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.UnaryOp, ast.Compare, ast.List, ast.Dict, ast.Set, ast.ListComp)
    return isinstance(value, (*new, ast.DictComp, ast.SetComp))


def _reads(scope: ast.AST, name: str) -> bool:
    names = (node for node in ast.walk(scope) if isinstance(node, ast.Name))
    return any(node.id == name and isinstance(node.ctx, ast.Load) for node in names)


def _name(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ast.unparse(node).partition("\n")[0]
    return dotted(node.func) or (f"….{node.func.attr}" if isinstance(node.func, ast.Attribute) else "…")
