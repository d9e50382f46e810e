"""Which threads call a model at this moment, and how does one of them get the model for itself?

A server calls its model from several threads at once. One thread at a time tells of the end of a step, and where levers
are engaged, calls are kept or a window begins, it waits until the calls under way are over, while those that would
begin wait for it. In: beginnings and ends of calls. Out: moments at which one thread is alone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition, RLock, get_ident, local
from types import TracebackType

LONGEST_WAIT_S = 20.0
"""So long calls of other threads are waited for; one of them may wait for a call that is kept from beginning."""

NEXT_WAIT_S = 1.0
"""The same after they have not ended once."""


class CallsUnderWay(RuntimeError):
    """Calls of other threads did not end in time, so that nothing can be changed."""


class _Here(local):
    calls = False


class Gate:
    """What calls of models pass as they begin and end.

    `with gate:` is a turn: other threads have theirs, and begin calls, before it or after it.
    """

    def __init__(self) -> None:
        self._here = _Here()
        self._wait_s = LONGEST_WAIT_S
        self.epoch = 0
        """Times that a thread has been alone: a call that began before the last of them is of another time."""
        self._renew()
        renew = weakref.WeakMethod(self._renew)
        os.register_at_fork(after_in_child=lambda: (found := renew()) and found())

    def _renew(self) -> None:
        """As at the start, and in a forked process, where no other thread is left."""
        self.lock = RLock()
        """Held in a turn, and as a call ends."""
        self._changed = Condition(self.lock)
        self._alone = self._depth = 0
        """Who waits to be alone, and how many turns within each other the thread has that holds the lock."""
        self.num_under_way = int(self._here.calls)
        """Outermost calls at this moment, without those whose thread waits for its turn."""

    def __enter__(self) -> None:
        self.lock.acquire()
        if self._alone not in (0, get_ident()):
            own = int(self._here.calls)
            self.num_under_way -= own  # it computes nothing while it waits
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._alone)
            except BaseException:
                self.num_under_way += own
                self.lock.release()
                raise
            self.num_under_way += own
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._depth -= 1
        self.lock.release()

    def begin(self) -> None:
        """In a turn: a call of this thread begins."""
        self.num_under_way += 1
        self._here.calls = True

    def end(self) -> None:
        """With the lock: it is over."""
        self.num_under_way -= 1
        self._here.calls = False
        if self._alone:
            self._changed.notify_all()

    def alone(self) -> None:
        """In a turn: from here to its end no other thread calls. Out of one nothing is waited for.

        Raises:
            CallsUnderWay: The calls of other threads do not end.
        """
        own = int(self._here.calls)
        self.epoch += 1
        if not self._depth or self.num_under_way == own:
            return
        depth, self._depth, self._alone = self._depth, 0, get_ident()
        try:
            ended = self._changed.wait_for(lambda: self.num_under_way == own, self._wait_s)
        finally:  # from here on the lock keeps others away
            self._depth, self._alone = depth, 0
            self._changed.notify_all()
        if not ended:
            waited_s, self._wait_s = self._wait_s, NEXT_WAIT_S
            raise CallsUnderWay(f"calls of other threads were not over after {waited_s:.0f} s")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A turn without other threads' calls, as far as these end in time."""
        with self:
            with suppress(CallsUnderWay):
                self.alone()
            yield
