"""How does an order reach a child? Through a named pipe, read line by line, with or without waiting.

In: the pipe's path. Out: whole lines. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import os
import select
import time

LOOK_EVERY_S = 0.05
"""How often a running child looks for an order; a look costs some microseconds, the clock that paces it less."""


class OrderPipe:
    """The child's end of the pipe; it is opened for each look, for a script may close what it did not open."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._rest = b""
        self._looked_s = 0.0
        self.closed = path is None
        """Whether nobody writes to it any more."""

    def read(self, *, wait: bool) -> str | None:
        """The next line; None where there is none yet (without waiting) or will be none (`closed`)."""
        if not wait:
            now = time.monotonic()
            if now - self._looked_s < LOOK_EVERY_S:
                return None
            self._looked_s = now
        while b"\n" not in self._rest:
            if self.closed or not self._has_more(wait=wait):
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _has_more(self, *, wait: bool) -> bool:
        try:
            descriptor = os.open(self._path or "", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self.closed = True
            return False
        except OSError:  # for the moment this process may open nothing more
            time.sleep(LOOK_EVERY_S if wait else 0.0)
            return wait
        try:
            chunk = os.read(descriptor, 65536)
            self._rest += chunk
            self.closed = not chunk
        except BlockingIOError:  # the parent holds its own end open, and has nothing to say yet
            if not wait:
                return False
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        finally:
            os.close(descriptor)
        return not self.closed
