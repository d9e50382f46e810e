"""What is left of an exception for the trace, and what of its traceback is the script's own?

In: exceptions. Out: `Failure` records, and tracebacks without flatout's frames. Imported in the user's process:
standard library only.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from flatout.trace import Failure


def failure(stage: str, problem: BaseException, order: int = -1) -> Failure:
    """The record of an exception."""
    try:
        message = str(problem)[:2000]
    except Exception:  # noqa: BLE001  the script's exceptions are its own
        message = ""
    return Failure(
        stage=stage,
        error=type(problem).__name__,
        message=message,
        order=order,
        filename=str(problem.filename) if isinstance(problem, OSError) and problem.filename else None,
        out_of_memory=isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError",
    )


def raised_by_handler(problem: BaseException) -> bool:
    """Whether an exception came out of a signal handler of the script's (a time limit, an end that was asked for)."""
    codes = {code for number in signal.valid_signals() if (code := _code(signal.getsignal(number))) is not None}
    traceback = problem.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: Any) -> Any:
    """The code that a handler runs: of a function, a method, a partial, or an object that can be called."""
    handler = getattr(handler, "func", handler)
    if not callable(handler):  # a default, or none
        return None
    return getattr(handler, "__code__", None) or getattr(handler.__call__, "__code__", None)


def hide_ours(problem: BaseException) -> None:
    """Take flatout's own frames out of the tracebacks of an exception, its causes, contexts and groups."""
    waiting: list[BaseException | None] = [problem]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = without_ours(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def without_ours(traceback: Any) -> Any:
    """The traceback with flatout's own frames taken out."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(here):
            kept.append(traceback)
        traceback = traceback.tb_next
    if not kept:
        return None
    for this, following in itertools.pairwise([*kept, None]):
        this.tb_next = following
    return kept[0]
