"""Where do the bytes of an image come from, when they are wanted later than the script opened it?

The open file itself is kept, by a descriptor of ours, so that the bytes are those of the file that was opened, whatever
its name stands for by then. In: a file object. Out: its bytes, read by whichever thread wants them.
"""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Callable
from typing import Any

from flatout.frameworks.pytorch.input.pixels.decoded import Identity, identity_of

MOST_OPEN = 64
"""Descriptors of ours that may be open at a time; beyond that, bytes are read at once."""

READ_BYTES = 2**24
"""Bytes that are read in one call."""


class Descriptors:
    """How many descriptors of ours are open in this process."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.pid = os.getpid()
        self.num = 0
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether one more may be opened."""
        if self.pid != os.getpid():
            self._begin()
        with self._lock:
            free = self.num < MOST_OPEN
            self.num += free
        return free

    def give_back(self, pid: int, *, getpid: Callable[[], int] = os.getpid) -> None:
        """One was closed that process `pid` opened."""
        if self.pid == pid == getpid():  # in a forked process nobody may be left to give the lock back
            with self._lock:
                self.num -= 1


class Source:
    """The bytes of one file: read already, or still to be read from a descriptor of ours."""

    def __init__(
        self,
        content: bytes | None,
        descriptor: int | None,
        descriptors: Descriptors,
        identity: Identity | None = None,
    ) -> None:
        self.identity = identity
        """What the file is known by; None where it may have changed since."""
        self._content = content
        self._descriptor = descriptor
        self._descriptors = descriptors
        self._pid = os.getpid()

    def content(self) -> bytes:
        """All of its bytes.

        Raises:
            OSError: They cannot be read.
        """
        if self._content is None:
            if self._descriptor is None:
                raise OSError("the bytes of the image were given back")
            self._content = _read(self._descriptor)
            if identity_of(os.fstat(self._descriptor)) != self.identity:
                self.identity = None
            self.close()
        return self._content

    def head(self, num: int) -> bytes:
        """So many bytes of its beginning.

        Raises:
            OSError: They cannot be read.
        """
        if self._content is not None:
            return self._content[:num]
        if self._descriptor is None:
            raise OSError("the bytes of the image were given back")
        return os.pread(self._descriptor, num, 0)

    def close(self, *, close: Callable[[int], None] = os.close) -> None:
        """Close the descriptor, where one is open; also where an interpreter ends, and `os` is gone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close(descriptor)
            self._descriptors.give_back(self._pid)

    def __del__(self) -> None:
        self.close()


def source_of(file: Any, descriptors: Descriptors) -> Source | None:
    """The bytes of a regular file or of one in memory; None for any other kind of file."""
    if type(file) is io.BytesIO:
        return Source(file.getvalue(), None, descriptors)
    if type(file) is not io.BufferedReader or type(file.raw) is not io.FileIO or file.closed:
        return None
    number = file.fileno()
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):
        return None
    identity = identity_of(found)
    if descriptors.take():
        try:
            return Source(None, os.dup(number), descriptors, identity)
        except OSError:  # the process has too many open
            descriptors.give_back(os.getpid())
    content = _read(number)
    return Source(content, None, descriptors, identity if identity_of(os.fstat(number)) == identity else None)


def _read(descriptor: int) -> bytes:
    """The file from its beginning; its position stays where it is."""
    parts, offset = [], 0
    wanted = os.fstat(descriptor).st_size + 1
    while part := os.pread(descriptor, min(wanted, READ_BYTES), offset):
        parts.append(part)
        offset += len(part)
        wanted = max(wanted - len(part), 1)
    return parts[0] if len(parts) == 1 else b"".join(parts)
