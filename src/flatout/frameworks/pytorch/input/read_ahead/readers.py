"""Who reads the files? A few threads that wait for storage, as long as it keeps them waiting.

Each file is opened, advised and read into the page cache, and closed again; nothing is kept here. Only regular files
are opened, and whatever goes wrong is nobody's business. Where files turn out to be in memory already, the threads
rest. In: paths, in the order in which they will be wanted. Out: nothing but warmer files.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.read_ahead.owner import ReadAhead

NUM_THREADS = 8
"""They wait most of the time: so many requests are under way at once, and each file's parts besides."""

MOST_FILE_BYTES = 2**24
"""A larger file may be one of which each item reads a part: it is left alone."""

ADVISED_BYTES = 2**17
"""The kernel takes no more of one advice than it reads ahead by itself, which is this by default."""

BUFFER_BYTES = 2**20
NUM_LOOKED_AT = 16
"""Files by which it is judged how quickly they are read."""

QUICK_S = 0.0003
QUICK_BYTES_PER_S = 1e9
"""A file that is read in less, for its size, was in memory, or lies on storage for which nothing is worth doing."""

REST = 512
"""Files that are not looked at after such ones."""


class Reading:
    """What is read ahead in one pass over a loader, by threads that end with it.

    Args:
        owner: Counts files that were not in memory, and says whether any are wanted.

    Attributes:
        num_given: Items that the script has been given; files of these are not wanted any more.
        rests_until: The item from which on reading is tried again.
        over: Whether the pass has ended.
    """

    def __init__(self, owner: ReadAhead) -> None:
        self.num_given = self.rests_until = 0
        self.over = False
        self._owner = owner
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._num_looked_at = self._num_quick = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "flatout-reading")

    def wants(self, number: int) -> bool:
        """Whether the file of an item is still worth reading."""
        return self._owner.engaged and not self.over and number >= max(self.num_given, self.rests_until)

    def add(self, number: int, paths: Sequence[str]) -> None:
        """Have the files of an item read; nobody is told when they are."""
        self._threads.submit(self._read, number, paths)

    def end(self) -> None:
        """The pass is over."""
        self.over = True
        if self._pid == os.getpid():  # and not in a process that was forked, where no thread is
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, number: int, paths: Sequence[str]) -> None:
        for path in paths:
            slow = read(path) if self.wants(number) else None
            if slow is not None:
                with self._lock:
                    self.judge(number, slow=slow)

    def judge(self, number: int, *, slow: bool) -> None:
        """A file was read: rest where the last ones were quick."""
        self._owner.num_files += slow
        self._num_looked_at += 1
        self._num_quick += not slow
        if self._num_looked_at == NUM_LOOKED_AT:
            if self._num_quick >= NUM_LOOKED_AT * 3 // 4:
                self.rests_until = number + REST
            self._num_looked_at = self._num_quick = 0


def read(path: str) -> bool | None:
    """Have the kernel read a file into its memory; whether that took a while. None where it is no file for that."""
    try:
        found = os.stat(path)  # opening a device or a pipe does something
        if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= MOST_FILE_BYTES:
            return None
        with open(path, "rb", buffering=0) as file:
            if _in_memory(file.fileno(), found.st_size):
                return False
            begun_s = time.perf_counter()
            for offset in range(0, found.st_size, ADVISED_BYTES):
                os.posix_fadvise(file.fileno(), offset, ADVISED_BYTES, os.POSIX_FADV_WILLNEED)
            while file.read(BUFFER_BYTES):
                pass
            return time.perf_counter() - begun_s >= QUICK_S + found.st_size / QUICK_BYTES_PER_S
    except (OSError, ValueError):
        return None


def _in_memory(descriptor: int, size: int) -> bool:
    """Whether the kernel says that it has a file's beginning and end; where it does not say, that has to be timed."""
    try:
        return all(os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) for place in (0, size - 1))
    except OSError:
        return False
