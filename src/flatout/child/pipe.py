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
        self._identity: tuple[int, int] | None = None
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
            self._identity = self._present()
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Read no more."""
        self.closed = True
        if self._descriptor >= 0 and self._present() == self._identity:
            os.close(self._descriptor)
        self._descriptor = -1

    def _present(self) -> tuple[int, int] | None:
        """What the descriptor stands for now: a script may close what it did not open, and get the number again."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def read(self, *, wait: bool) -> str | None:
        """The next line; None where there is none yet (without waiting) or will be none (`closed`)."""
        if not wait:
            now = time.monotonic()
            if now - self._looked_s < LOOK_EVERY_S:
                return None
            self._looked_s = now
        while True:
            line, separator, rest = self._rest.partition(b"\n")
            if separator:
                self._rest = rest
                return line.decode()
            if self.closed or not self._has_more(wait=wait):
                return None

    def _has_more(self, *, wait: bool) -> bool:
        """Whether something came; closes at the end."""
        if self._descriptor < 0 or self._present() != self._identity:
            self.close()
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(None if wait else 0):
            return False
        try:
            chunk = os.read(self._descriptor, 65536)
        except BlockingIOError:  # another process of the script took it: look again
            return True
        if not chunk:
            self.close()
            return False
        self._rest += chunk
        return True
