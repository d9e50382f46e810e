"""decoded_store: keep decoded images in memory; from the second pass over the data on only the random part is done.

Kept is what PIL's decoders of JPEG and PNG made of which bytes (`flatout.frameworks.pytorch.input.decoders`), as far as
it fits into half of the memory that is free. The script's own code runs as it is, in workers too. Keeping may take as
long as it has saved, so that it takes two or three passes until all is there. A trial sees a gain only where its steps
come to images that it had already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch.lever_reasons import why_none
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts, LoaderFacts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.frameworks.pytorch.session import Session


class DecodedStore(Lever):
    """Images are decoded once."""

    name = "decoded_store"
    summary = "decoded images kept in memory, for transforms that draw random numbers"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "step"
    check = "batches"
    takes_memory = True
    checks_itself = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose items have to be computed one by one, where PIL is used."""
        return why_none([self._refusal(loader) for loader in facts.loaders])

    def _refusal(self, loader: LoaderFacts) -> str | None:
        if None in (loader.refusal("fused_fetch"), loader.refusal("virtual_workers")):
            return "its batches can be computed at once"
        return loader.refusal(self.name)

    def why_not(self, session: Session, loader: DataLoader[Any]) -> str | None:
        """Its images cannot be kept decoded."""
        return session.loaders.why_not(lambda parts: parts.decoded, loader, for_workers=loader.num_workers > 0)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next image on; workers from the next pass on."""
        session.loaders.pipeline.decoded.engage(True)

    def release(self, session: Session) -> None:
        """Decoded each time again; those that are kept wait."""
        session.loaders.pipeline.decoded.engage(False)

    def evidence(self, session: Session) -> str | None:
        """Images that were not decoded again."""
        num = session.loaders.pipeline.decoded.num_given
        return f"{num:,} images not decoded again" if num else None
