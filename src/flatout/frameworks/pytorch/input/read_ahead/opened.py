"""Which of some files does anybody open? The kernel is asked to tell (inotify), and nothing of the script's is touched.

So it does not matter by which library a file is opened, or in which process. In: paths. Out: those that were opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

_OPEN, _ONCE = 0x20, 0x80000000
_HEAD = struct.Struct("iIII")
_MOST_BYTES = 2**16
_NAME = "anon_inode:inotify"


class Opened:
    """Some files that are watched; empty where the kernel does not watch.

    Source: `inotify(7)`, Linux manual pages.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._watched: dict[int, set[str]] = {}
        self._descriptor: int | None = None
        self._pid = os.getpid()
        if hasattr(self._libc, "inotify_init1"):
            descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._descriptor = descriptor if descriptor >= 0 else None
            if descriptor >= 0 and not self._ours():  # it could never be told whether it still is
                os.close(descriptor)
                self._descriptor = None

    def add(self, path: str) -> bool:
        """Watch a file from now on; whether it can be."""
        if self._descriptor is None:
            return False
        try:
            number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), ctypes.c_uint32(_OPEN | _ONCE))
        except ValueError:  # no name of a file
            return False
        if number >= 0:
            self._watched.setdefault(number, set()).add(path)
        return bool(number >= 0)

    def told(self) -> set[str]:
        """Those that were opened since they were told the last time."""
        found: set[str] = set()
        if self._descriptor is None or not self._ours():
            return found
        with contextlib.suppress(OSError):  # nothing has happened since
            while events := os.read(self._descriptor, _MOST_BYTES):
                offset = 0
                while offset < len(events):
                    number, mask, _, num_bytes = _HEAD.unpack_from(events, offset)
                    offset += _HEAD.size + num_bytes
                    if mask & _OPEN:
                        found |= self._watched.get(number, set())
        return found

    def _ours(self) -> bool:
        """Whether the descriptor is ours still: a script may close all that it finds, and the number be another's."""
        try:
            return os.getpid() == self._pid and os.readlink(f"/proc/self/fd/{self._descriptor}") == _NAME
        except OSError:
            return False

    def close(self) -> None:
        """Watch nothing any more."""
        if self._descriptor is not None and self._ours():
            os.close(self._descriptor)
        self._descriptor = None

    def __del__(self) -> None:
        self.close()
