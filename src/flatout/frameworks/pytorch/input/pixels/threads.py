"""Which threads do pixel work? A few that wait for jobs, and the one that asks for a batch, once it has nothing else.

The threads run no code of the script's and draw no random numbers; who has nothing to do for a while ends. A process
that was forked has none of them: it starts its own. Who does what is decided in `queue.py`; here it is done. In: jobs.
Out: the jobs done.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from flatout.frameworks.pytorch.input.pixels.queue import Instead, Queue

MOST_WAITING = 256
"""Jobs that wait; who would add one more does one first."""

IDLE_S = 10.0
"""How long a thread waits for a job before it ends."""

PATIENCE_S = 300.0
"""How long one waits for a job that another thread does."""

ROUND_S = 1.0
"""How long one waits before it asks again: an interruption may have come where somebody was to be woken."""

Bell: TypeAlias = "SimpleQueue[None]"
"""What one who sleeps waits for; rung before it sleeps, it does not sleep."""


class Job:
    """Something to be done once, by whoever comes first; it keeps what goes wrong itself."""

    __slots__ = ("_do", "done")

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self.done = False

    def run(self) -> None:
        """Do it, unless it was dropped."""
        do, self._do = self._do, None
        if do is not None:
            do()

    def drop(self) -> None:
        """Nobody wants it any more."""
        self._do = None


class Threads:
    """The threads of a process that do pixel work."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._begin()
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _begin_again(own()))

    def _begin(self) -> None:
        """Without threads and jobs, as in a new process."""
        self._queue: Queue[Job] = Queue(MOST_WAITING, self.num)
        self._lock = threading.Lock()
        self._bells: list[Bell] = [SimpleQueue() for _ in range(self.num)]

    @property
    def num_running(self) -> int:
        """Threads that there are at present."""
        return len(self._queue.threads)

    def add(self, job: Job) -> None:
        """Have a job done."""
        while True:
            with self._lock:
                added = self._queue.add(job)
            if added.first is None:
                break
            self._do(added.first)
        if added.wake is not None:
            self._bells[added.wake].put(None)
        if added.start is not None:
            self._start(added.start)

    def _start(self, number: int) -> None:
        own = self._queue, self._lock, self._bells[number]
        thread = threading.Thread(target=_work, args=(number, *own), name=f"flatout-pixels-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the process is ending: who asks for the batch does it all
            with self._lock:
                self._queue.not_started(number)

    def _do(self, job: Job) -> None:
        """Do a job in this thread."""
        try:
            job.run()
        finally:
            with self._lock:
                woken = _done(self._queue, job)
            _ring(woken)

    def finish(self, jobs: Sequence[Job]) -> bool:
        """Help until all of these are done; whether they are."""
        bell: Bell = SimpleQueue()
        with self._lock:
            if not self._queue.wait(bell, [job for job in jobs if not job.done]):
                return False
        try:
            return self._helped(bell)
        finally:
            with self._lock:
                self._queue.leave(bell)

    def _helped(self, bell: Bell) -> bool:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            with self._lock:
                job = self._queue.ask(bell)
            if job is Instead.GO:
                return True
            if isinstance(job, Job):
                self._do(job)
            elif not _rung(bell, ROUND_S) and time.monotonic() > until_s:
                return False


def _begin_again(threads: Threads | None) -> None:
    """In a process that was forked, before anything else runs there."""
    if threads is not None:
        threads._begin()


def _work(number: int, queue: Queue[Job], lock: threading.Lock, bell: Bell) -> None:
    """What a thread does."""
    tired = False
    while True:
        with lock:
            job = queue.next(number, tired=tired)
        if job is Instead.END:
            return
        tired = False
        if not isinstance(job, Job):
            tired = not _rung(bell, IDLE_S)
            continue
        with contextlib.suppress(BaseException):  # the batch has it from the job, and the thread has others to do
            job.run()
        with lock:
            woken = _done(queue, job)
        del job  # which holds an item while the thread sleeps
        _ring(woken)


def _done(queue: Queue[Job], job: Job) -> list[Hashable]:
    """A job is done: who is to be woken; under the lock."""
    job.done = True
    return queue.done(job)


def _ring(woken: Iterable[Hashable]) -> None:
    for bell in woken:
        assert isinstance(bell, SimpleQueue)
        bell.put(None)


def _rung(bell: Bell, limit_s: float) -> bool:
    """Sleep; whether one was woken."""
    try:
        bell.get(timeout=limit_s)
    except Empty:
        return False
    return True
