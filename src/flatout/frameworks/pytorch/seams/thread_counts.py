"""How is the number of threads of one operation set in every thread that calls models?

`torch.set_num_threads` is of the thread that calls it, once operations have run in others. In: the number. Out: each
thread set to it before its next call, and back to its own.
"""

from __future__ import annotations

from threading import local

import torch


class _Here(local):
    own = 0
    """What this thread had, while it is set to another number; else 0."""


class ThreadCounts:
    """Sets each thread as it comes."""

    def __init__(self) -> None:
        self.wanted = 0
        """Threads of one operation; 0: as many as the thread that calls has by itself."""
        self._here = _Here()

    def apply(self) -> None:
        """Set this thread."""
        own = self._here.own
        if not self.wanted and not own:
            return
        wanted, present = self.wanted or own, torch.get_num_threads()
        self._here.own = (own or present) if self.wanted else 0
        if present != wanted:
            torch.set_num_threads(wanted)
