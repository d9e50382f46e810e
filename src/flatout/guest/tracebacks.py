"""Which frames of a traceback are the script's own?

In: an exception that passes by on its way to the script. Out: the same exception, with flatout's frames taken out.
Imported in the user's process: standard library only.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""What lies here is flatout's own; a script may lie in a folder of that name."""


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
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(HERE):
            kept.append(traceback)
        traceback = traceback.tb_next
    if not kept:
        return None
    for this, following in itertools.pairwise([*kept, None]):
        this.tb_next = following
    return kept[0]
