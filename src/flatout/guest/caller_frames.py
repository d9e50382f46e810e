"""In whose line is something called? Tracebacks and warnings name it, and shall name plain's and not ours.

In: a function of PyTorch's and a piece of the line. Out: what calls in a frame like that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def caller_in(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    """What calls its first operand with the others in a frame of `function`, where it first has the call `text`.

    Without the source, or where it has no such line, in a frame of ours.
    """
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        return _called
    found = next(((number, line.index(text)) for number, line in enumerate(lines, first) if text in line), None)
    if found is None:
        return _called
    return _caller(function.__code__.co_filename, found, len(text), function.__name__, function.__globals__)


def _called(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return call(*given, **named)


def _caller(filename: str, place: tuple[int, int], width: int, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Calls at a line and column of a file; `width`: of the call in the source, which Python underlines."""
    number, column = place
    head, call = f"def {name}(f,*a,**b):", "f(*a,**b"
    body = "return ".rjust(max(column, 8)) + call.ljust(width - 1) + ")"
    source = "\n" * (number - 2) + f"{head}\n{body}\n" if number > 1 else f"{head} {body.lstrip()}\n"
    made: dict[str, Callable[..., Any]] = {}
    exec(compile(source, filename, "exec"), names, made)  # there is no other way to a frame in that line
    return made[name]
