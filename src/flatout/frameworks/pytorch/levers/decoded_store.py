"""decoded_store: keep decoded images in memory; from the second pass over the data on only the random part is done.

The pixel work is done by threads, as under `pixel_threads`, which it takes the place of. Kept is what fits into half of
the memory that is free, by the identity of each file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_reasons import why_none
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
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
    conflicts: ClassVar = ("workers", "pixel_threads")
    contains: ClassVar = ("pixel_threads",)
    partners: ClassVar = ("prefetch",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose pixel work can be done by threads."""
        return why_none([loader.why_not_pixel_threads for loader in facts.loaders])

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next image on."""
        session.loaders.engage("decoded", True)

    def release(self, session: Session) -> None:
        """Decoded each time again; those that are kept wait."""
        session.loaders.engage("decoded", False)

    def evidence(self, session: Session) -> str | None:
        """Images that were not decoded again."""
        num = session.loaders.pipeline.pixels.decoded.num_given
        return f"{num:,} images not decoded again" if num else None
