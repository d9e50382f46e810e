"""collector: have Python's garbage collector work at step ends, past the objects that were there before.

The objects of a script that has begun to train hardly ever become garbage, and each full collection walks them all.
They are frozen (`gc.freeze`); the other collections wait for the end of the step, where Python's own counts say which
of them is due. The collector is not switched off: where a step, or what lies between two, makes many times the objects
that Python waits for, it works as it always does, so that an evaluation piles nothing up. What was frozen is walked
again, where a full collection comes up, as long as that takes no more than 1 % of the time; so garbage among it is
found, late, and at once where the script calls `gc.collect()` now and then. Processes forked from this one collect as
plain Python does. Where the script takes to steering the collector itself, it is given back.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

DEFAULT_THRESHOLDS = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
"""What interpreters set themselves. Source: `pycore_runtime_init.h` of CPython 3.11 and 3.12, of 3.13, of 3.14."""

FROZEN_AT_START = 1000
"""So many objects an interpreter may have frozen before the script began: Python 3.12 has, a few hundred."""

PATIENCE = 10
"""How many times the objects that Python waits for may be made before it collects within a step after all."""

REST = 100
"""Walking all objects is followed by this many times as long in which those frozen are left out: 1 % of the time."""

WALK_S = 1e-7
"""Seconds that walking one object takes at most, believed until a walk has been timed."""


class Collector(Lever):
    """`gc.freeze`, and collections at step ends."""

    name = "collector"
    summary = "Python's garbage collector at step ends only, past what was there before"
    class_ = "exact"
    shortens: ClassVar = ("garbage",)
    check = "none"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Where the script leaves Python's collector as it is."""
        return STEERED if facts.collector_of_its_own else None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Freeze what is there, and wait for step ends."""
        from flatout.frameworks.pytorch.session import Unavailable

        if is_steered():
            raise Unavailable(STEERED)
        paced = Paced(lambda: _give_way(session))
        session.kept[self.name] = paced
        paced.begin()
        session.at_step_end[self.name] = paced.at_step_end
        session.calls.around_search = paced.thawed
        session.in_forks(self.name, lambda: paced.end(collect=False))

    def release(self, session: Session) -> None:
        """Give the collector back as it was."""
        paced = session.kept.pop(self.name, None)
        if paced is not None:
            _give_way(session)
            paced.end()

    def evidence(self, session: Session) -> str | None:
        """Objects that are left out, with the thresholds still ours, and collections at step ends."""
        paced = session.kept.get(self.name)
        if paced is None or not paced.is_on or not paced.num_frozen:
            return None
        times = "collection" if paced.num_collections == 1 else "collections"
        return f"{paced.num_frozen} objects left out, {paced.num_collections} {times} at step ends"


STEERED = "the script steers the garbage collector itself"


def is_steered() -> bool:
    """Whether the collector is other than as the interpreter starts it; one without generations counts as such."""
    return (
        not gc.isenabled()
        or gc.get_threshold() not in DEFAULT_THRESHOLDS
        or gc.get_freeze_count() > FROZEN_AT_START
        or gc.get_debug() != 0
        or "t" in sys.abiflags
    )


def _give_way(session: Session) -> None:
    """Nothing of this lever is called from here on."""
    session.at_step_end.pop(Collector.name, None)
    session.calls.around_search = None
    session.in_forks(Collector.name, None)


class _Tracked:
    """Something that the collector counts, and that is not taken from a free list."""

    __slots__ = ("held",)


class Paced:
    """The collector while the lever is engaged.

    Attributes:
        is_on: Whether it is ours to steer.
        num_frozen: Objects that collections leave out.
        num_collections: Collections at step ends.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.is_on = False
        self.num_frozen = 0
        self.num_collections = 0
        self._give_way = give_way
        self._own = gc.get_threshold()
        self._raised = (self._own[0] * PATIENCE, *self._own[1:])
        self._walks_in_parts = self._own[2] == 0  # from Python 3.14 on no collection is a full one by itself
        self._is_walking = False
        self._has_walked_part = False
        """Whether the last full collection saw a part of the objects alone, and Python takes that for all there are."""
        self._began_s = self._walked_s = 0.0
        self._cost_s = 0.0

    def begin(self) -> None:
        """Freeze what is there."""
        self.is_on, self._has_walked_part = True, False
        gc.set_threshold(*self._raised)
        gc.freeze()
        self.num_frozen = gc.get_freeze_count()
        self._cost_s = self.num_frozen * WALK_S
        self._walked_s = perf_counter()
        gc.callbacks.append(self._around)

    def end(self, *, collect: bool = True) -> None:
        """Give back what is still ours: thresholds, and what is frozen where the script has frozen nothing."""
        if self._around in gc.callbacks:
            gc.callbacks.remove(self._around)
        if not self.is_on:
            return
        self.is_on = False
        if gc.get_threshold() == self._raised:
            gc.set_threshold(*self._own)
        if self._is_ours():
            gc.unfreeze()
        if collect and self._has_walked_part and gc.isenabled():
            gc.collect()

    def at_step_end(self) -> None:
        """A step has ended: have Python make the collection that its own thresholds say is due."""
        if not self.is_on:  # in a process forked from the one that trains
            return
        if gc.get_threshold() != self._raised or not gc.isenabled():  # since `engage` the script has its own way
            self._give_way()
            self.end()
            return
        before = gc.get_count()[0]
        if before <= self._own[0]:
            return
        if self._walks_in_parts and self._is_rested():
            gc.collect()
        else:
            gc.set_threshold(*self._own)
            for _ in range(2):  # the first makes it due; from Python 3.12 on it begins where a loop goes round
                _Tracked()
            gc.set_threshold(*self._raised)
        self.num_collections += gc.get_count()[0] < before

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """What is frozen is not among `gc.get_objects()`, where the owners of parameters are looked for."""
        if not self.is_on or not self._is_ours():
            yield
            return
        gc.unfreeze()
        try:
            yield
        finally:
            self._freeze()

    def _freeze(self) -> None:
        gc.freeze()
        self.num_frozen = gc.get_freeze_count()

    def _is_ours(self) -> bool:
        """Whether what is frozen is what we froze: some of it may be gone, but there is no more of it."""
        return 0 < gc.get_freeze_count() <= self.num_frozen

    def _is_rested(self) -> bool:
        return perf_counter() - self._walked_s > REST * self._cost_s

    def _around(self, moment: str, details: Mapping[str, int]) -> None:
        """A collection begins or ends: a full one walks what is frozen as well, where that has not been for long."""
        if details["generation"] < 2 or not self.is_on:
            return
        if moment == "start":
            if self._is_rested() and self._is_ours():
                self._is_walking = True
                self._began_s = perf_counter()
                gc.unfreeze()
        elif self._is_walking:
            self._is_walking = False
            self._walked_s = perf_counter()
            self._cost_s = self._walked_s - self._began_s
            self._has_walked_part = False
            self._freeze()
        else:
            self._has_walked_part = True
