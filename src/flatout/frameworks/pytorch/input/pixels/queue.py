"""Who does which job, who sleeps, and who is to be woken?

Pure: nothing here runs, waits or knows the time. Threads and those who wait for jobs ask, one after another, and are
told what to do next; `threads.py` asks under one lock and does as it is told. All interleavings of a small case are
explored by a test. In: events. Out: a job, or what to do instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job", bound=Hashable)


class Instead(Enum):
    """What one who asks for a job is to do where there is none."""

    SLEEP = "until it is woken, or for as long as it likes: it asks again in any case"
    END = "the thread is not needed any more"
    GO = "all that was waited for is done"


class Added(NamedTuple, Generic[Job]):
    """What one who adds a job is to do.

    Attributes:
        first: A job to be done before this one is added once more, for too many wait; None where it was added.
        wake: The thread that is to be woken.
        start: The number of a thread that is to be started.
    """

    first: Job | None = None
    wake: int | None = None
    start: int | None = None


class Queue(Generic[Job]):
    """Jobs, the threads that do them, by numbers, and those who wait for some of them.

    A job that nobody wants any more stays where it is: whoever gets it has nothing to do.
    """

    def __init__(self, most_waiting: int, most_threads: int) -> None:
        self.most_waiting = most_waiting
        self.most_threads = most_threads
        self.waiting: deque[Job] = deque()
        """Jobs that nobody has taken."""
        self.not_done: set[Job] = set()
        """Those, and the ones that somebody is doing."""
        self.threads: set[int] = set()
        """Threads that run or are to be started."""
        self.asleep: list[int] = []
        """Those that sleep and were not woken."""
        self.left: dict[Hashable, set[Job]] = {}
        """What those who wait for jobs still wait for."""
        self.sleepers: set[Hashable] = set()
        """Those of them who sleep and were not woken."""

    def add(self, job: Job) -> Added[Job]:
        """Somebody has a job."""
        if len(self.waiting) >= self.most_waiting:
            return Added(first=self.waiting.popleft())
        self.waiting.append(job)
        self.not_done.add(job)
        if self.asleep:
            return Added(wake=self.asleep.pop())
        if len(self.threads) >= self.most_threads:
            return Added()
        number = next(number for number in range(self.most_threads) if number not in self.threads)
        self.threads.add(number)
        return Added(start=number)

    def not_started(self, number: int) -> None:
        """A thread could not be started: who waits for its job does it."""
        self.threads.discard(number)

    def next(self, number: int, *, tired: bool = False) -> Job | Instead:
        """A thread asks; `tired`: it has slept as long as it likes to, and nothing woke it."""
        if number in self.asleep and (tired or self.waiting):
            self.asleep.remove(number)
            if not self.waiting:
                self.threads.discard(number)
                return Instead.END
        if self.waiting:
            return self.waiting.popleft()
        if number not in self.asleep:  # woken for a job that somebody else has taken meanwhile
            self.asleep.append(number)
        return Instead.SLEEP

    def wait(self, who: Hashable, jobs: Iterable[Job]) -> bool:
        """Somebody is going to wait for jobs that are not done; False where one of them is never done: nobody has it.

        That is so in a process that was forked, which has a new queue.
        """
        left = set(jobs)
        if not left <= self.not_done:
            return False
        self.left[who] = left
        return True

    def ask(self, who: Hashable) -> Job | Instead:
        """One who waits asks: it helps, whosever jobs those are, before it sleeps."""
        self.sleepers.discard(who)
        if not self.left[who]:
            return Instead.GO
        if self.waiting:
            return self.waiting.popleft()
        self.sleepers.add(who)
        return Instead.SLEEP

    def done(self, job: Job) -> list[Hashable]:
        """A job is done; those who sleep and now have all they wait for, and are to be woken."""
        self.not_done.discard(job)
        woken = []
        for who, left in self.left.items():
            left.discard(job)
            if not left and who in self.sleepers:
                self.sleepers.discard(who)
                woken.append(who)
        return woken

    def leave(self, who: Hashable) -> None:
        """Somebody waits no more."""
        self.left.pop(who, None)
        self.sleepers.discard(who)
