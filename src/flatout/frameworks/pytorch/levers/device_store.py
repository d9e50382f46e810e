"""device_store: have the items that `sample_store` keeps lie on the GPU as well, where all of them fit.

The script's `.to(device)` then finds a batch that is put together there. The GPU gets its rows from the copies that the
script makes anyway; they take at most half of the GPU's memory that is free beyond 1 GiB, leave a quarter of all of it
free, and are given up where the script runs short of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_bases import CudaLever, why_none
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class DeviceStore(CudaLever):
    """Kept items on the device."""

    name = "device_store"
    summary = "the items that `sample_store` keeps on the GPU as well, where all of them fit"
    class_ = "exact"
    shortens: ClassVar = ("copy",)
    check = "batches"
    takes_memory = True
    checks_itself = True
    partners: ClassVar = ("sample_store", "device_prefetch")

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A script that computes on a GPU, from items that can be kept."""
        if (reason := super().applies(facts, machine)) is not None:
            return reason
        return why_none([loader.refusal("sample_store") for loader in facts.loaders])

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next batch of kept items on."""
        session.require_cuda()
        transfer = session.loaders.transfer
        transfer.engage("store", True, session.loaders.passes)
        session.loaders.parts.stored.on_taken = transfer.gathered

    def release(self, session: Session) -> None:
        """Batches are copied again; the rows on the device wait with those that are kept."""
        session.loaders.parts.stored.on_taken = None
        session.loaders.transfer.engage("store", False)

    def evidence(self, session: Session) -> str | None:
        """Tensors that were put together on the device."""
        num = session.loaders.transfer.num["gathered"]
        return f"{num:,} tensors put together on the GPU" if num else None
