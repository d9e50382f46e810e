"""workers: more worker processes than the script has, fewer, or none.

Exact where items are deterministic: same items, same order, same random streams (the check compares hashes). Where
items are random, other workers draw other random numbers: then the check says so and it takes `--accept statistical`.
They begin anew at every pass, unless the script keeps its own; the first batch of every pass is computed once more as
plain does. What differs is left to plain from there on, and the run says so. Items that draw from a generator of the
dataset's own are random. For a script without workers there is `ahead`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.lever_bases import DEFAULT_PREFETCH_FACTOR
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

BLIND_BATCH_BYTES = 32 * 2**20
"""What a batch that cannot be looked into is taken to need."""


def shm_needed(facts: Facts, num_workers: int) -> int:
    """Shared memory that so many workers need, in bytes: batches wait in it, and too little kills them.

    Each worker holds its prefetched batches and the one it is
    building, and the script two; doubled, for batches differ in size. Docker's default of 64 MB has broken many a run.
    """
    ready = [loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR for loader in facts.loaders]
    return sum(
        2 * (num_workers * (num_ready + 1) + 2) * (loader.batch_bytes or BLIND_BATCH_BYTES)
        for num_ready, loader in zip(ready, facts.loaders, strict=True)
    )


class Workers(Lever):
    """`num_workers` and persistence of training loaders."""

    name = "workers"
    parameter = "num"
    summary = "another number of workers, or none; exact unless items draw random numbers, compared in every pass"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "epoch"
    check = "batches"
    takes_memory = True
    partners: ClassVar = ("threads",)  # a worker and a model of as many threads as cores take each other's

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A DataLoader with workers, of the usual kind, and room for its batches."""
        if not facts.loaders:
            return "no DataLoader feeds the training"
        if all(loader.iterable for loader in facts.loaders):
            return "an iterable dataset decides itself how workers share it"
        if not any(loader.num_workers for loader in facts.loaders):
            return "the script has no workers"
        if not any(loader.changeable for loader in facts.loaders):
            return (
                "the loader is of a kind of its own, names its multiprocessing context, gives batches out of order, "
                "or draws from a generator of the script's"
            )
        needed = shm_needed(facts, 1)
        if machine.shm_bytes is not None and machine.shm_bytes < needed:
            return f"/dev/shm has {machine.shm_bytes / 2**20:.0f} MB, and one worker may need {needed / 2**20:.0f} MB"
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """As many as cores, and fewer, than the script has too, down to none; without the present state."""
        now = max((loader.num_workers for loader in facts.loaders), default=0)
        cores = machine.num_cores
        room = math.inf if machine.shm_bytes is None else machine.shm_bytes
        numbers = dict.fromkeys(n for n in (cores, 8, 4, 2, 1) if n <= cores or n < now)
        return tuple({"num": n} for n in (*numbers, 0) if n != now and shm_needed(facts, n) <= room)

    def brings_back(self, facts: Facts) -> Mapping[str, Setting] | None:
        """No workers, where the script has some that can be changed."""
        return {"num": 0} if any(one.num_workers and one.changeable for one in facts.loaders) else None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next pass on (in a trial from the next fetch on)."""
        num = int(settings["num"])
        session.loaders.num_changed = 0
        session.loaders.set(num_workers=num)

    def release(self, session: Session) -> None:
        """Back to the script's."""
        session.loaders.unset("num_workers")

    def evidence(self, session: Session) -> str | None:
        """Passes that were opened so, and the workers they have."""
        num = session.loaders.num_changed
        return f"{session.loaders.settings.get('num_workers')} workers in {num} passes" if num else None
