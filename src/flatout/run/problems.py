"""What is left of an exception for the trace?

In: exceptions. Out: `Failure` records. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import os

from flatout.trace import Failure


def failure(stage: str, problem: BaseException, order: int = -1) -> Failure:
    """The record of an exception."""
    try:
        message = str(problem)[:2000] or _place(problem)
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


def _place(problem: BaseException) -> str:
    """Where an exception was raised, for one that says nothing."""
    traceback = problem.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    return f"line {traceback.tb_lineno} of `{os.path.basename(traceback.tb_frame.f_code.co_filename)}`"
