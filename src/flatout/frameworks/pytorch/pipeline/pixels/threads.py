"""Which threads do pixel work? A few that wait for jobs, and the one that asks for a batch, once it has nothing else.

The threads run no code of the script's and draw no random numbers; who has nothing to do for a while ends. A process
that was forked has none of them: it starts its own. In: jobs. Out: the jobs done.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

MOST_WAITING = 256
"""Jobs that wait; who would add one more does one first."""

IDLE_S = 10.0
"""How long a thread waits for a job before it ends."""

PATIENCE_S = 300.0
"""How long one waits for a job that another thread does."""

ROUND_S = 1.0
"""How long one waits before looking again whether the other thread is still there."""


class Job:
    """Something to be done once, by whoever comes first; it catches what it raises itself."""

    __slots__ = ("_do", "done", "pid")

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self.done = False
        self.pid = os.getpid()

    def run(self) -> None:
        """Do it, unless it was dropped."""
        do, self._do = self._do, None
        try:
            if do is not None:
                do()
        finally:
            self.done = True

    def drop(self) -> None:
        """Nobody wants it any more."""
        self._do = None


class Threads:
    """The threads of a process that do pixel work."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._begin()

    def _begin(self) -> None:
        """Without threads and jobs, as in a new process."""
        self._pid = os.getpid()
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._running: dict[int, threading.Thread] = {}
        self._num_idle = 0

    def add(self, job: Job) -> None:
        """Have a job done."""
        if self._pid != os.getpid():
            self._begin()
        while len(self._waiting) >= MOST_WAITING and self.help():
            pass
        with self._lock:
            self._waiting.append(job)
            self._added.notify()
            wanting = len(self._waiting) > self._num_idle and len(self._running) < self.num
            if wanting:
                self._start()

    def _start(self) -> None:
        """One more thread; under the lock."""
        number = next(number for number in range(self.num) if number not in self._running)
        thread = threading.Thread(target=self._work, args=(number,), name=f"flatout-pixels-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the process is ending: who asks for the batch does it all
            return
        self._running[number] = thread

    def _work(self, number: int) -> None:
        """What a thread does."""
        try:
            while (job := self._next()) is not None:
                job.run()
                del job
                self._tell()
        finally:
            with self._lock:
                self._running.pop(number, None)
                self._finished.notify_all()

    def _next(self) -> Job | None:
        """The job that has waited longest; None where none comes for a while."""
        with self._lock:
            self._num_idle += 1
            try:
                if not self._waiting:
                    self._added.wait_for(lambda: self._waiting, IDLE_S)
            finally:
                self._num_idle -= 1
            return self._waiting.popleft() if self._waiting else None

    def help(self) -> bool:
        """Do the job that has waited longest, in this thread; whether there was one."""
        with self._lock:
            job = self._waiting.popleft() if self._waiting else None
        if job is not None:
            job.run()
            self._tell()
        return job is not None

    def _tell(self) -> None:
        """Who waits for a job looks whether it is done."""
        with self._lock:
            self._finished.notify_all()

    def finish(self, jobs: Sequence[Job]) -> bool:
        """Help until all of these are done; whether they are."""
        until_s = time.monotonic() + PATIENCE_S
        while not all(job.done for job in jobs):
            if any(job.pid != os.getpid() for job in jobs):  # the threads that do them are not in this process
                return False
            if self.help():
                continue
            with self._lock:
                if self._waiting or all(job.done for job in jobs):
                    continue
                self._finished.wait(ROUND_S)
                nobody = not any(thread.is_alive() for thread in self._running.values())
            if nobody or time.monotonic() > until_s:
                return all(job.done for job in jobs)
        return True
