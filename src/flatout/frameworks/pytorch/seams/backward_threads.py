"""Does this thread train? The backward on a GPU runs in a thread of autograd's own, while the one that called it waits.

In: nothing. Out: yes or no.
"""

from __future__ import annotations

from threading import get_ident

import torch


def in_backward() -> bool:
    """Whether this thread is within a backward, its own or that of the thread that waits for it."""
    return bool(torch._C._current_graph_task_id() != -1)


def trains(thread: int) -> bool:
    """Whether this is that thread, or a backward runs here."""
    return get_ident() == thread or in_backward()
