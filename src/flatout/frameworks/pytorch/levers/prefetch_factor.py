"""prefetch_factor: have each of the script's workers keep more batches ready, against batches that take unequally long.

The same workers build the same batches with the same random numbers, only sooner. Indices are taken from the sampler
sooner as well, which is done for PyTorch's own samplers only. What the training writes into memory that it shares with
workers reaches a pass under way later, which the check does not see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_reasons import why_none
from flatout.frameworks.pytorch.levers.workers import shm_needed
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts, LoaderFacts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

TRIED = (4, 8)
"""Batches for each worker; PyTorch's default is 2."""


class PrefetchFactor(Lever):
    """`prefetch_factor` of training loaders that have workers."""

    name = "prefetch_factor"
    parameter = "num"
    least = 1
    summary = "more batches kept ready by each worker of the script, where some take longer than others"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "epoch"
    check = "batches"
    takes_memory = True
    conflicts: ClassVar = ("workers", "virtual_workers")

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A DataLoader of the usual kind with workers, and room for more of its batches."""
        why = why_none([loader.why_not_sooner for loader in facts.loaders])
        if why is not None:
            return why
        if not any(_may_have(loader) for loader in facts.loaders):
            return "the loader is of a kind of its own, or decides itself how workers share it"
        if not self.settings(facts, machine):
            return "as many are kept ready already, or /dev/shm has no room for more"
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """Twice and four times PyTorch's default, where that is more than now and `/dev/shm` has room for it."""
        with_workers = [loader for loader in facts.loaders if _may_have(loader)]
        now = min((loader.prefetch_factor or 0 for loader in with_workers), default=0)
        most = max((loader.num_workers for loader in with_workers), default=0)
        room = math.inf if machine.shm_bytes is None else machine.shm_bytes
        return tuple({"num": num} for num in TRIED if num > now and shm_needed(facts, most, num) <= room)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next pass on (in a trial from the next fetch on)."""
        session.loaders.num_changed = 0
        session.loaders.set(prefetch_factor=int(settings["num"]))

    def release(self, session: Session) -> None:
        """Back to the script's."""
        session.loaders.unset("prefetch_factor")

    def evidence(self, session: Session) -> str | None:
        """Passes that were opened so."""
        num = session.loaders.num_changed
        return f"{session.loaders.settings.get('prefetch_factor')} batches a worker in {num} passes" if num else None


def _may_have(loader: LoaderFacts) -> bool:
    return loader.why_not_sooner is None and loader.changeable and not loader.iterable
