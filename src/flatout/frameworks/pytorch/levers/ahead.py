"""ahead: batches of a script without workers, made by processes that draw what the script would have drawn.

Each process stands where the script's random generators will stand when it asks for a batch, by how far a batch and the
training between two were seen to move them; a batch is taken only where they really stand there, and then they are
moved to where it ended. So items, their order and every later random number are plain's to the bit. All that an item's
code reaches is compared with each batch, here and there; what it does besides (write, print, call a program) is stopped
before it is done, and the batch is fetched plainly. A loader that reaches something of which nobody can say whether
items change it (a lock, a connection, an open file, an object of a library in C) is refused by name. Some batches (the
1st, 2nd, 4th, 8th ... of a loader) are computed here as well and compared.

What nobody sees: files that the training changes while items read them, the time of day, and what the training writes
in mid-pass into an array of NumPy's above 4 MiB that the dataset holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.lever_bases import why_none
from flatout.frameworks.pytorch.levers.workers import shm_needed
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class Ahead(Lever):
    """Processes ahead of a loader that has none."""

    name = "ahead"
    parameter = "num"
    least = 1
    summary = "batches of a script without workers made in processes, random numbers included, exactly"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "epoch"
    check = "batches"
    checks_itself = True
    takes_memory = True
    deals_out_cores = True
    conflicts: ClassVar = ("workers", "virtual_workers", "fused_fetch", "sample_store", "read_ahead")
    partners: ClassVar = ("threads",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader without workers, and room for its batches."""
        return why_none([loader.refusal(self.name) for loader in facts.loaders])

    def why_not(self, session: Any, loader: Any) -> str | None:
        """What its processes may not do or were seen to do, and a loader of the usual kind."""
        from flatout.frameworks.pytorch.input.ahead.ahead import refusal

        if not session.loaders.may_open(loader):
            return "the loader is of a kind of its own"
        return session.loaders.why_left_to_plain(loader) or refusal(loader)

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """As many as cores, and one."""
        room = math.inf if machine.shm_bytes is None else machine.shm_bytes
        numbers = dict.fromkeys((machine.num_cores, max(machine.num_cores // 2, 1), 1))
        return tuple({"num": n} for n in numbers if shm_needed(facts, n) <= room)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next pass on (in a trial from the next fetch on)."""
        session.loaders.num_ahead = 0
        session.loaders.set(ahead=int(settings["num"]))

    def release(self, session: Session) -> None:
        """As the script has it."""
        session.loaders.unset("ahead")

    def evidence(self, session: Session) -> str | None:
        """Batches that were made ahead and taken."""
        num = session.loaders.num_ahead
        return f"{num:,} batches made ahead" if num else None
