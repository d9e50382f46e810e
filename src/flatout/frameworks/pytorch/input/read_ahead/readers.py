"""Who reads the files? A few threads that wait for storage, as long as it keeps them waiting.

Each file is opened, advised and read into the page cache, and closed again; nothing is kept here. Only regular files
are opened, without waiting and without a change of their times where that is allowed, and whatever goes wrong is
nobody's business. Where files turn out to be in memory already, the threads rest. In: paths, in the order in which they
will be wanted. Out: nothing but warmer files.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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

IDLE_S = 2.0
"""How long a thread waits for something to do before it ends."""

ENDING_S = 0.1
"""How long the end of a pass waits for threads to end."""


@dataclass
class Reading:
    """What is read ahead in one pass over a loader.

    Attributes:
        num_given: Items that the script has been given; files of these are not wanted any more.
        rests_until: The item from which on reading is tried again.
        over: Whether the pass has ended.
    """

    num_given: int = 0
    rests_until: int = 0
    over: bool = False
    _num_looked_at: int = 0
    _num_quick: int = 0

    def wants(self, number: int) -> bool:
        """Whether the file of an item is still worth reading."""
        return not self.over and number >= max(self.num_given, self.rests_until)

    def judge(self, number: int, *, slow: bool) -> None:
        """Rest where the last files were quick; under the readers' lock."""
        self._num_looked_at += 1
        self._num_quick += not slow
        if self._num_looked_at == NUM_LOOKED_AT:
            if self._num_quick >= NUM_LOOKED_AT * 3 // 4:
                self.rests_until = number + REST
            self._num_looked_at = self._num_quick = 0


class Readers:
    """The threads of a process that read files ahead."""

    def __init__(self, num: int = NUM_THREADS) -> None:
        self.num = num
        self.num_read = 0
        """Files that were not in memory, since the process began."""
        self._begin()

    def _begin(self) -> None:
        """Without threads, as in a new process."""
        self._pid = os.getpid()
        self._added = threading.Condition()
        self._waiting: deque[tuple[Reading, int, Sequence[str]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._ending = False

    def add(self, reading: Reading, number: int, paths: Sequence[str]) -> None:
        """Have the files of an item read; nobody is told when they are."""
        if self._pid != os.getpid():
            self._begin()
        with self._added:
            self._ending = False
            self._waiting.append((reading, number, paths))
            self._added.notify()
            if len(self._threads) < self.num:
                thread = threading.Thread(target=self._work, name="flatout-reading", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the process is ending
                    return
                self._threads.add(thread)

    def drop(self) -> None:
        """Nothing that waits is wanted any more."""
        if self._pid == os.getpid():
            with self._added:
                self._waiting.clear()

    def end(self, reading: Reading) -> None:
        """A pass is over: threads without work end at once, so that the script finds none, and can fork workers."""
        reading.over = True
        if self._pid != os.getpid():
            return
        with self._added:
            self._ending = all(one.over for one, _, _ in self._waiting)
            self._added.notify_all()
            threads = list(self._threads) if self._ending else []
        until_s = time.monotonic() + ENDING_S
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _work(self) -> None:
        """What a thread does."""
        buffer = bytearray(BUFFER_BYTES)
        while (job := self._next()) is not None:
            reading, number, paths = job
            for path in paths:
                slow = read(path, buffer) if reading.wants(number) else None
                if slow is not None:
                    with self._added:
                        self.num_read += slow
                        reading.judge(number, slow=slow)
            del job, reading

    def _next(self) -> tuple[Reading, int, Sequence[str]] | None:
        """The item that is wanted first; None where none comes for a while."""
        with self._added:
            self._added.wait_for(lambda: self._waiting or self._ending, IDLE_S)
            if self._waiting:
                return self._waiting.popleft()
            self._threads.discard(threading.current_thread())
            return None


def read(path: str, buffer: bytearray) -> bool | None:
    """Have the kernel read a file into its memory; whether that took a while. None where it is no file for that."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device or a pipe does something
            return None
        descriptor = _opened(path)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(descriptor)
        size = found.st_size
        if not stat.S_ISREG(found.st_mode) or not 0 < size <= MOST_FILE_BYTES:
            return None
        if _in_memory(descriptor, size):
            return False
        begun_s = time.perf_counter()
        for offset in range(0, size, ADVISED_BYTES):
            os.posix_fadvise(descriptor, offset, ADVISED_BYTES, os.POSIX_FADV_WILLNEED)
        offset = 0
        while offset < size and (num := os.preadv(descriptor, [buffer], offset)):
            offset += num
        return time.perf_counter() - begun_s >= QUICK_S + size / QUICK_BYTES_PER_S
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:  # the times of other people's files cannot be kept
        return os.open(path, flags)


def _in_memory(descriptor: int, size: int) -> bool:
    """Whether the kernel says that it has a file's beginning and end; where it does not say, that has to be timed."""
    try:
        return all(os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) for place in (0, size - 1))
    except OSError:
        return False
