"""fused_fetch: compute each batch at once, where it is known what the dataset computes, and collate nothing.

What a dataset computes is read from its own code (`flatout.frameworks.pytorch.input.items`). The batches are bit for
bit the same, and a share of them is computed both ways for as long as the script runs.
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


class FusedFetch(Lever):
    """One call for all items of a batch."""

    name = "fused_fetch"
    summary = "each batch computed at once instead of item by item, from what the dataset's own code says"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "step"
    check = "batches"
    checks_itself = True
    conflicts: ClassVar = ("workers",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose dataset could be read."""
        return why_none([loader.refusal(self.name) for loader in facts.loaders])

    def why_not(self, session: Session, loader: DataLoader[Any]) -> str | None:
        """Its items cannot be computed at once."""
        return session.loaders.why_not(lambda parts: parts.fused, loader, for_workers=False)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next fetch on."""
        session.loaders.pipeline.fused.engage(True)
        session.loaders.attach()

    def release(self, session: Session) -> None:
        """Item by item again."""
        session.loaders.pipeline.fused.engage(False)

    def evidence(self, session: Session) -> str | None:
        """Batches that were computed so."""
        num = session.loaders.pipeline.fused.num_batches
        return f"{num:,} batches computed at once" if num else None
