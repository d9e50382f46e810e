"""pinned_memory: let the loader put batches into page-locked memory, from which copies to the GPU are faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_bases import CudaLever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class PinnedMemory(CudaLever):
    """`pin_memory=True` on training loaders."""

    name = "pinned_memory"
    summary = "batches in page-locked memory, for faster copies to the GPU"
    class_ = "exact"
    shortens: ClassVar = ("copy",)
    toggles = "epoch"
    check = "batches"
    checks_itself = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Loaders that feed a GPU and do not pin yet."""
        if (reason := super().applies(facts, machine)) is not None:
            return reason
        if not facts.loaders:
            return "no DataLoader feeds the training"
        if all(loader.pinned for loader in facts.loaders):
            return "already pinned"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next pass on."""
        session.loaders.set(pin_memory=True)

    def release(self, session: Session) -> None:
        """Back to the script's."""
        session.loaders.unset("pin_memory")

    def evidence(self, session: Session) -> str | None:
        """Passes that were opened so."""
        return f"{session.loaders.num_changed} passes opened pinned" if session.loaders.num_changed else None
