"""prefetch: begin the next batch while the training computes, for a loader that has no workers.

Its random numbers are drawn on the guess that the training draws none meanwhile; where the guess is wrong the batch is
begun again, and after a few wrong ones no more is guessed. The pixel work is done by threads, as under `pixel_threads`,
which it takes the place of.
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


class Prefetch(Lever):
    """One batch ahead."""

    name = "prefetch"
    summary = "the next batch of images begun while the training computes, without workers"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "step"
    check = "batches"
    takes_memory = True
    checks_itself = True
    conflicts: ClassVar = ("workers", "pixel_threads")
    contains: ClassVar = ("pixel_threads",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose pixel work can be done by threads, in an order that is known beforehand."""
        return why_none([loader.why_not_ahead for loader in facts.loaders])

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next fetch on."""
        session.loaders.engage("ahead", True)

    def release(self, session: Session) -> None:
        """Begun when it is asked for again; one that is begun already is still given."""
        session.loaders.engage("ahead", False)

    def evidence(self, session: Session) -> str | None:
        """Batches that had been begun when they were asked for."""
        num = session.loaders.pipeline.ahead.num_batches
        return f"{num:,} batches begun early" if num else None
