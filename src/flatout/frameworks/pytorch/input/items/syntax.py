"""What is the source of a function, for certain? Files change after they were loaded, and functions are replaced.

In: a function. Out: its syntax tree, where compiling its file again gives the very code that runs; else why not.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator
from functools import lru_cache


class NoSource(Exception):
    """The source of a function is not there, or is not that of the code that runs."""


@lru_cache(maxsize=256)
def syntax_of(code: types.CodeType) -> ast.FunctionDef:
    """The definition of a function, by its code."""
    tree, codes = _file(code.co_filename)
    if code not in codes:
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
