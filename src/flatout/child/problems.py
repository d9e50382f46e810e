"""What is left of an exception for the trace?

In: exceptions. Out: `Failure` records. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import os
import traceback

from flatout.guest.memory_errors import out_of_memory
from flatout.guest.tracebacks import HERE
from flatout.records.trace import Failure

_LIBRARY = os.path.dirname(os.__file__) + os.sep
"""The standard library, and below it what is installed beside it."""


def failure(stage: str, problem: BaseException, order: int = -1) -> Failure:
    """The record of an exception."""
    try:
        message = str(problem)[:2000] or _place(problem)
        place, is_memory = _own_place(problem), out_of_memory(problem)
    except Exception:  # noqa: BLE001  the script's exceptions are its own
        message, place, is_memory = "", "", False
    return Failure(
        stage=stage,
        error=type(problem).__name__,
        message=message,
        order=order,
        filename=str(problem.filename) if isinstance(problem, OSError) and problem.filename else None,
        out_of_memory=is_memory,
        place=place,
    )


def _own_place(problem: BaseException) -> str:
    """File and line where the script's own code was when it was raised; what is installed is not the script's own."""
    if isinstance(problem, SyntaxError) and problem.filename and problem.lineno:
        return f"{os.path.abspath(problem.filename)}:{problem.lineno}"
    found = ""
    for frame, line in traceback.walk_tb(problem.__traceback__):
        name = frame.f_code.co_filename
        installed = name.startswith((HERE, _LIBRARY, "<")) or f"{os.sep}site-packages{os.sep}" in name
        if not installed and f"{os.sep}dist-packages{os.sep}" not in name:
            found = f"{os.path.abspath(name)}:{line}"
    return found


def _place(problem: BaseException) -> str:
    """Where an exception was raised, for one that says nothing."""
    places = [*traceback.walk_tb(problem.__traceback__)]
    return f"line {places[-1][1]} of `{os.path.basename(places[-1][0].f_code.co_filename)}`" if places else ""
