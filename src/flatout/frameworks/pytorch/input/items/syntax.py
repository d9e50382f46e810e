"""What is the source of a function, for certain? Files change after they were loaded, and functions are replaced.

In: a function. Out: its syntax tree, where compiling its file again gives the very code that runs; else why not.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator
from functools import lru_cache

_PARTS = (
    *("co_name", "co_qualname", "co_firstlineno", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
)


class NoSource(Exception):
    """The source of a function is not there, or is not that of the code that runs."""


@lru_cache(maxsize=256)
def body_of(code: types.CodeType) -> tuple[ast.arguments, list[ast.stmt]]:
    """The parameters and the statements of a function, or of a lambda, by its code.

    Raises:
        NoSource: Says why they cannot be read.
    """
    if code.co_name != "<lambda>":
        definition = syntax_of(code)
        return definition.args, definition.body
    tree, codes = _file(code.co_filename)
    if not any(_same(found, code) for found in codes):
        raise NoSource("its source has changed since it was loaded")
    there = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and _holds(node.body, there)]
    if not found or not there:
        raise NoSource("it is not known where it stands")
    innermost = max(found, key=lambda node: (node.lineno, node.col_offset))
    return innermost.args, [ast.copy_location(ast.Return(value=innermost.body), innermost.body)]


def _holds(node: ast.expr, places: list[tuple[int, int]]) -> bool:
    """Whether an expression covers all of these lines and columns."""
    end = (node.end_lineno or 0, node.end_col_offset or 0)
    return all((node.lineno, node.col_offset) <= place < end for place in places)


@lru_cache(maxsize=256)
def syntax_of(code: types.CodeType) -> ast.FunctionDef:
    """The definition of a function, by its code.

    Raises:
        NoSource: Says why it cannot be read.
    """
    tree, codes = _file(code.co_filename)
    if not any(_same(found, code) for found in codes):
        raise NoSource("its source has changed since it was loaded")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise NoSource("it has no definition of its own")


@lru_cache(maxsize=32)
def _file(name: str) -> tuple[ast.Module, tuple[types.CodeType, ...]]:
    try:
        source = "".join(linecache.getlines(name))
        if not source:
            raise NoSource("its source is not there")
        tree = ast.parse(source)
        return tree, tuple(_codes(compile(source, name, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoSource("its source cannot be read") from None


def forget() -> None:
    """Let go of whole files, which each collection of garbage would walk; definitions that were asked for stay."""
    _file.cache_clear()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _same(one: types.CodeType, other: types.CodeType) -> bool:
    if any(getattr(one, part) != getattr(other, part) for part in _PARTS) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same(a, b) if isinstance(a, types.CodeType) and isinstance(b, types.CodeType) else (type(a), a) == (type(b), b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )
