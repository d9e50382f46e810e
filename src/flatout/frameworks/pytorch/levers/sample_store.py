"""sample_store: compute each item once and keep it; from the second pass over the data on a batch is a gather.

What is not kept yet is computed at once, as under `fused_fetch`, which it takes the place of.

What an item is made of is looked at each time, and a share of the kept items is computed again for as long as the
script runs. All items are kept, where they fit into half of the memory that is free, or none.
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


class SampleStore(Lever):
    """Items are kept in memory."""

    name = "sample_store"
    summary = "each item computed once and kept in memory, where it is known what it is made of"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "step"
    check = "batches"
    keeps_items = True
    takes_memory = True
    checks_itself = True
    conflicts: ClassVar = ("workers", "fused_fetch")
    contains: ClassVar = ("fused_fetch",)
    partners: ClassVar = ("virtual_workers",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose dataset could be read, and computes something."""
        return why_none([loader.refusal(self.name) for loader in facts.loaders])

    def in_part(self, facts: Facts) -> str | None:
        """What is not kept is computed at once, where that can be."""
        return "computes batches at once" if any(one.refusal("fused_fetch") is None for one in facts.loaders) else None

    def why_not(self, session: Session, loader: DataLoader[Any]) -> str | None:
        """Its items cannot be computed once and kept."""
        return session.loaders.why_not(lambda parts: parts.stored, loader, for_workers=loader.num_workers > 0)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next fetch on; items that are kept already stay."""
        loaders = session.loaders
        loaders.pipeline.stored.engage(True, fill=loaders.training if loaders.reopen else ())  # at once in a trial
        loaders.attach()

    def release(self, session: Session) -> None:
        """Items are computed again; those that are kept wait."""
        session.loaders.pipeline.stored.engage(False)

    def evidence(self, session: Session) -> str | None:
        """Batches that were put together of kept items."""
        num = session.loaders.pipeline.stored.num_batches
        return f"{num:,} batches of kept items" if num else None
