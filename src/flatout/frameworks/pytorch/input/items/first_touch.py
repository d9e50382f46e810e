"""Memory whose pages are there before it is written to.

The kernel gives a page at the first touch, and clears it: for rows that are written once, that takes longer than
writing them. So a thread has it done a little ahead of where the training writes. In: an array that is filled from its
beginning on. Out: the same array, untouched; nothing where the kernel does not know how (before Linux 5.14).
"""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np

AHEAD_BYTES = 32 * 2**20
"""How far ahead of the last row; so much may be taken and never used."""

LEAST_BYTES = 4 * 2**20
"""A smaller array is not worth a thread."""

AT_ONCE_BYTES = 2 * 2**20
"""In one call, during which the kernel lets nobody else in this process map memory; the size of a large page."""

POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux: pages as if they were written to, what is in them unchanged."""

PAGE_BYTES = 4096


class FirstTouch:
    """The pages of one array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._from, self._until = 0, array.nbytes if sys.platform == "linux" and array.nbytes >= LEAST_BYTES else 0

    def reached(self, num_bytes: int) -> None:
        """So many bytes from its beginning have been written, or are about to be."""
        if self._from < self._until and num_bytes + AHEAD_BYTES // 2 > self._from:
            first, self._from = max(self._from, num_bytes), max(self._from, num_bytes) + AHEAD_BYTES
            self._begin(first, min(self._from, self._until))

    def _begin(self, first: int, after: int) -> None:
        start = self._array.ctypes.data
        first = -(-(start + first) // PAGE_BYTES) * PAGE_BYTES
        num_bytes = (start + after - first) // PAGE_BYTES * PAGE_BYTES
        if num_bytes <= 0:
            return
        thread = threading.Thread(target=self._touch, args=(first, num_bytes), name="flatout-pages", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the process is ending: who writes waits for the kernel
            self._until = 0

    def _touch(self, address: int, num_bytes: int) -> None:
        for first in range(address, address + num_bytes, AT_ONCE_BYTES):
            some = min(AT_ONCE_BYTES, address + num_bytes - first)
            if _advise(ctypes.c_void_p(first), ctypes.c_size_t(some), POPULATE_WRITE):
                self._until = 0
                return


_advise = ctypes.CDLL(None).madvise if sys.platform == "linux" else lambda *_: -1
"""Called without Python's lock, which is what the thread is for."""
