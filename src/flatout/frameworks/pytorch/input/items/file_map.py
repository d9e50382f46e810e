"""Memory that begins as the bytes of a file and goes on as this process's own.

The file is mapped copy-on-write over memory of ours: on Linux a page is the file's until it is written to here, so what
others append to the file shows, and what is written here stays here. Pages that nobody has written yet are given back
to memory of ours before they are used: to touch them in a file on a full disk would be a bus error. No descriptor stays
open. In: a file and a size. Out: an array of bytes.

Source: mmap(2) and tmpfs(5), Linux manual pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, TypeAlias

import numpy as np

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_NO_RESERVE, _FIXED = 0x4000, 0x10  # the same numbers on x86-64 and aarch64
_OURS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class FileMap:
    """A file's bytes in memory.

    Args:
        path: The file.
        num_bytes: Its size, at least 1.

    Raises:
        OSError: It cannot be mapped.
        EOFError: The file is shorter: to read beyond its end would be a bus error.
    """

    def __init__(self, path: os.PathLike[str], num_bytes: int) -> None:
        self._room = mmap.mmap(-1, num_bytes, flags=_OURS, prot=_READ_WRITE)
        self._num_bytes = num_bytes
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe has no bytes yet
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                raise EOFError(str(path))
            self._map(0, mmap.MAP_PRIVATE | _NO_RESERVE, descriptor)
        finally:
            os.close(descriptor)

    @property
    def bytes(self) -> Bytes:
        """All of it; whoever has the array keeps the memory."""
        return np.frombuffer(self._room, np.uint8)

    def own_from(self, num_bytes: int) -> None:
        """What lies behind the first `num_bytes`, which the file has, is memory of ours from now on.

        Raises:
            OSError: There is no memory for it.
        """
        page = mmap.PAGESIZE
        first = -(-num_bytes // page) * page
        if first < self._num_bytes:
            self._map(first, _OURS, -1)

    def _map(self, first: int, flags: int, descriptor: int) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_int, ctypes.c_long),
        )
        found = libc.mmap(start + first, self._num_bytes - first, _READ_WRITE, flags | _FIXED, descriptor, 0)
        if found != start + first:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
