"""How does an order reach a child? Through a named pipe, read line by line, with or without waiting.

In: the pipe's path. Out: whole lines. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import os
import select
import time

LOOK_EVERY_S = 0.05
"""How often a running child looks for an order; a look costs about a microsecond, the clock that paces it less."""


class OrderPipe:
    """The child's end of the pipe."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._descriptor = -1
        self._rest = b""
        self._looked_s = 0.0
        self.closed = path is None
        """Whether nobody writes to it any more."""

    def open(self) -> None:
        """Open it; the parent holds its own end open, so this does not wait."""
        if self._path is None:
            return
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self.closed = True

    def read(self, *, wait: bool) -> str | None:
        """The next line; None where there is none yet (without waiting) or will be none (`closed`)."""
        if not wait:
            now = time.monotonic()
            if now - self._looked_s < LOOK_EVERY_S:
                return None
            self._looked_s = now
        while not self.closed:
            line, separator, rest = self._rest.partition(b"\n")
            if separator:
                self._rest = rest
                return line.decode()
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(None if wait else 0):
                return None
            chunk = os.read(self._descriptor, 65536)
            if not chunk:
                self.closed = True
            self._rest += chunk
        return None
