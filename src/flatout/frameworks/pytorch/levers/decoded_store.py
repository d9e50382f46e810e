"""decoded_store: keep decoded images in memory; from the second pass over the data on only the random part is done.

Kept is what PIL's decoders of JPEG and PNG made of which bytes (`flatout.frameworks.pytorch.input.decoders`), as far as
it fits into half of the memory that is free. The script's own code runs as it is, in workers too. Keeping may take as
long as it has saved, so that it takes two or three passes until all is there. A trial sees a gain only where its steps
come to images that it had already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.frameworks.pytorch.lever_bases import LoaderLever, why_none
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts, LoaderFacts
from flatout.records.trace import Setting


class DecodedStore(LoaderLever):
    """Images are decoded once."""

    name = "decoded_store"
    summary = "decoded images kept in memory, for transforms that draw random numbers"
    takes_memory = True
    part = "decoded"
    counted = ("num_given", "images not decoded again")

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose items have to be computed one by one, where PIL is used."""
        return why_none([self._refusal(loader) for loader in facts.loaders])

    def _refusal(self, loader: LoaderFacts) -> str | None:
        if None in (loader.refusal("fused_fetch"), loader.refusal("virtual_workers")):
            return "its batches can be computed at once"
        return loader.refusal(self.name)

    def serves_workers(self, loader: Any) -> bool:
        """Workers share what is kept."""
        return bool(loader.num_workers > 0)

    def engage(self, session: Any, settings: Mapping[str, Setting]) -> None:
        """From the next image on; workers from the next pass on."""
        session.loaders.parts.decoded.engage(True)
