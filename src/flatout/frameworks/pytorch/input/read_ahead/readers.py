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
from collections import deque
from collections.abc import Sequence

NUM_THREADS = 8
"""They wait most of the time: so many requests are under way at once, and each file's parts besides."""

MOST_FILE_BYTES = 2**24
"""A larger file may be one of which each item reads a part: it is left alone."""

ADVISED_BYTES = 2**17
"""The kernel takes no more of one advice than it reads ahead by itself, which is this by default."""

BUFFER_BYTES = 2**20

IDLE_S, ENDING_S = 2.0, 0.1
"""A thread without work ends after so long; at the end of a pass they are waited for so long."""

NUM_LOOKED_AT = 16
"""Files by which it is judged how quickly they are read."""

QUICK_S = 0.0003
QUICK_BYTES_PER_S = 1e9
"""A file that is read in less, for its size, was in memory, or lies on storage for which nothing is worth doing."""

REST = 512
"""Files that are not looked at after such ones."""


class Wanted:
    """Whether anything is to be read ahead in this process, and what has been."""

    def __init__(self) -> None:
        self.engaged = False
        self.num_files = 0
        """Read since it was engaged, of those that were not in memory."""


class Reading:
    """What is read ahead in one pass over a loader, by threads that end with it.

    Args:
        owner: Counts files that were not in memory, and says whether any are wanted.

    Attributes:
        num_given: Items that the script has been given; files of these are not wanted any more.
        rests_until: The item from which on reading is tried again.
        over: Whether the pass has ended.
    """

    def __init__(self, owner: Wanted) -> None:
        self.num_given = self.rests_until = 0
        self.over = False
        self._owner = owner
        self._pid = os.getpid()
        self._added = threading.Condition()
        self._waiting: deque[tuple[int, Sequence[str]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_looked_at = self._num_quick = 0

    def wants(self, number: int) -> bool:
        """Whether the file of an item is still worth reading."""
        return self._owner.engaged and not self.over and number >= max(self.num_given, self.rests_until)

    def add(self, number: int, paths: Sequence[str]) -> None:
        """Have the files of an item read; nobody is told when they are."""
        if self._pid != os.getpid():  # a process that was forked, where no thread is and the lock may be held
            return
        with self._added:
            self._waiting.append((number, paths))
            self._added.notify()
            if len(self._threads) < NUM_THREADS and not self.over:
                thread = threading.Thread(target=self._work, name="flatout-reading", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the process is ending
                    return
                self._threads.add(thread)

    def end(self) -> None:
        """The pass is over: its threads end at once, so that the script finds none, and can fork workers."""
        self.over = True
        if self._pid != os.getpid():  # a process that was forked, where no thread is
            return
        with self._added:
            self._waiting.clear()
            self._added.notify_all()
            threads = list(self._threads)
        until_s = time.monotonic() + ENDING_S
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _work(self) -> None:
        while (job := self._next()) is not None:
            number, paths = job
            for path in paths:
                slow = read(path) if self.wants(number) else None
                if slow is not None:
                    with self._added:
                        self.judge(number, slow=slow)

    def _next(self) -> tuple[int, Sequence[str]] | None:
        """The item that is wanted first; None where none comes for a while."""
        with self._added:
            self._added.wait_for(lambda: self._waiting or self.over, IDLE_S)
            if self._waiting:
                return self._waiting.popleft()
            self._threads.discard(threading.current_thread())
            return None

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
