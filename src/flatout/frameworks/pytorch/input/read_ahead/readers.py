"""Who reads the files, and how far ahead? A few threads that wait for storage, as long as it keeps them waiting.

Each file is opened, advised and read into the page cache, and closed again; nothing is kept here. Only regular files
are opened, without waiting and without a change of their times where that is allowed, and whatever goes wrong is
nobody's business. Where files turn out to be in memory already, or are not kept by the kernel, the threads rest. In:
paths, in the order in which they will be wanted. Out: nothing but warmer files.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flatout.machine.control_groups import free_memory_bytes

NUM_THREADS = 8
"""They wait most of the time: so many requests are under way at once, and each file's parts besides."""

MOST_BYTES = 2**28
FREE_SHARE = 1 / 16
"""How much is read ahead at most: so many bytes, and this share of the memory that is free."""

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


@dataclass(frozen=True)
class Took:
    """One file.

    Attributes:
        num_bytes: Its size.
        read_s: How long reading it took.
        again_s: How long it took to read a byte of it once more; None where it was in memory to begin with.
    """

    num_bytes: int
    read_s: float
    again_s: float | None

    @property
    def quick(self) -> bool:
        """Whether reading it ahead is worth nothing."""
        return self.again_s is None or self.read_s < QUICK_S + self.num_bytes / QUICK_BYTES_PER_S


@dataclass
class Reading:
    """What is read ahead in one pass over a loader.

    Attributes:
        most_bytes: That may be ahead.
        num_given: Items that the script has been given; files of these are not wanted any more.
        rests_until: The item from which on reading is tried again.
        over: Whether the pass has ended, or reading brings it nothing.
        ahead: Bytes that were read for each item that is still to come.
    """

    most_bytes: int
    num_given: int = 0
    rests_until: int = 0
    over: bool = False
    ahead: dict[int, int] = field(default_factory=dict)
    _looked_at: list[Took] = field(default_factory=list)

    def wants(self, number: int) -> bool:
        """Whether the file of an item is still worth reading."""
        return not self.over and number >= max(self.num_given, self.rests_until)

    def judge(self, number: int, took: Took) -> None:
        """Rest, or end, where the last files were quick, or did not stay in memory; under the readers' lock."""
        self._looked_at.append(took)
        if len(self._looked_at) == NUM_LOOKED_AT:
            looked, self._looked_at = self._looked_at, []
            if sum(one.quick for one in looked) >= NUM_LOOKED_AT * 3 // 4:
                self.rests_until = number + REST
            elif _quarter([one.again_s or 0.0 for one in looked]) > _quarter([one.read_s for one in looked]) / 2:
                self.over = True


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
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)
        self._passed = threading.Condition(self._lock)
        self._waiting: deque[tuple[Reading, int, Sequence[str]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._ending = False

    def reading(self) -> Reading:
        """What a new pass begins with."""
        return Reading(min(MOST_BYTES, int((free_memory_bytes() or 0) * FREE_SHARE)))

    def add(self, reading: Reading, number: int, paths: Sequence[str]) -> None:
        """Have the files of an item read; nobody is told when they are."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._ending = False
            self._waiting.append((reading, number, paths))
            self._added.notify()
            if len(self._waiting) > self._num_idle and len(self._threads) < self.num:
                thread = threading.Thread(target=self._work, name="flatout-reading", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the process is ending
                    return
                self._threads.add(thread)

    def given(self, reading: Reading, num: int) -> None:
        """The script has been given so many more items."""
        reading.num_given += num
        if self._pid == os.getpid() and reading.ahead:
            with self._lock:
                for number in [number for number in reading.ahead if number < reading.num_given]:
                    del reading.ahead[number]
                self._passed.notify_all()

    def drop(self) -> None:
        """Nothing that waits is wanted any more."""
        if self._pid == os.getpid():
            with self._lock:
                self._waiting.clear()

    def end(self, reading: Reading) -> None:
        """A pass is over; threads without work end at once, so that the script can fork workers for the next one."""
        reading.over = True
        if self._pid != os.getpid():
            return
        with self._lock:
            self._ending = all(one.over for one, _, _ in self._waiting)
            self._added.notify_all()
            self._passed.notify_all()
            threads = list(self._threads) if self._ending else []
        until_s = time.monotonic() + ENDING_S
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _work(self) -> None:
        """What a thread does."""
        buffer = bytearray(BUFFER_BYTES)
        try:
            while (job := self._next()) is not None:
                reading, number, paths = job
                for path in paths:
                    took = read(path, buffer, functools.partial(self._room, reading, number))
                    if took is not None:
                        with self._lock:
                            self.num_read += not took.quick
                            reading.judge(number, took)
                del job, reading
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self) -> tuple[Reading, int, Sequence[str]] | None:
        """The item that is wanted first; None where none comes for a while."""
        with self._lock:
            while True:
                while self._waiting:
                    job = self._waiting.popleft()
                    if job[0].wants(job[1]):
                        return job
                self._num_idle += 1
                try:
                    if not self._added.wait_for(lambda: self._waiting or self._ending, IDLE_S) or not self._waiting:
                        return None
                finally:
                    self._num_idle -= 1

    def _room(self, reading: Reading, number: int, size: int) -> bool:
        """Wait until a file may be read; whether it is still wanted then."""
        with self._lock:
            while reading.wants(number) and size <= reading.most_bytes:
                if sum(reading.ahead.values()) + size <= reading.most_bytes:
                    reading.ahead[number] = reading.ahead.get(number, 0) + size
                    return True
                if not self._passed.wait(IDLE_S):  # the script is busy with something else
                    return False
        return False


def read(path: str, buffer: bytearray, room: Callable[[int], bool]) -> Took | None:
    """Have the kernel read a file into its memory; None where it is no file for that.

    `room`: asked with the file's size, after it is open, whether it is to be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device or a pipe does something
            return None
        descriptor = _opened(path)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(descriptor)
        size = found.st_size
        if not stat.S_ISREG(found.st_mode) or not 0 < size <= MOST_FILE_BYTES or not room(size):
            return None
        if _in_memory(descriptor, size):
            return Took(size, 0.0, None)
        begun_s = time.perf_counter()
        for offset in range(0, size, ADVISED_BYTES):
            os.posix_fadvise(descriptor, offset, ADVISED_BYTES, os.POSIX_FADV_WILLNEED)
        offset = 0
        while offset < size and (num := os.preadv(descriptor, [buffer], offset)):
            offset += num
        read_s = time.perf_counter()
        os.pread(descriptor, 1, 0)
        return Took(size, read_s - begun_s, time.perf_counter() - read_s)
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


def _quarter(times_s: Sequence[float]) -> float:
    return sorted(times_s)[len(times_s) // 4]
