"""virtual_workers: build in this process what the script's workers would build.

Where items are small, workers hurt: handing a batch from a process to another costs more than computing it, which is
done at once where it is known what the dataset computes. Each worker's random stream is kept apart. Like each worker,
it has a copy of the dataset, made when the workers would begin; items that read settings outside it are left to
workers. Only what the training writes into an array in place is seen here at once, and by workers late or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch.lever_reasons import why_none
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.frameworks.pytorch.session import Session


class VirtualWorkers(Lever):
    """The script's workers, without processes."""

    name = "virtual_workers"
    summary = "what the script's workers build computed at once, without workers"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "epoch"
    check = "batches"
    checks_itself = True
    conflicts: ClassVar = ("workers",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader with workers whose dataset could be read."""
        return why_none([loader.refusal(self.name) for loader in facts.loaders])

    def why_not(self, session: Session, loader: DataLoader[Any]) -> str | None:
        """Its items cannot be computed at once in the place of workers."""
        return session.loaders.why_not(lambda parts: parts.fused, loader, for_workers=True)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next pass on (in a trial from the next fetch on)."""
        session.loaders.num_changed = 0
        session.loaders.set(in_process=True)

    def release(self, session: Session) -> None:
        """Back to the script's workers."""
        session.loaders.unset("in_process")

    def evidence(self, session: Session) -> str | None:
        """Passes that were opened so."""
        num = session.loaders.num_changed
        return f"{num} {'pass' if num == 1 else 'passes'} without the script's workers" if num else None
