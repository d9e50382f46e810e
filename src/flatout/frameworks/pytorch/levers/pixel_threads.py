"""pixel_threads: decode, crop, resize and normalize the images of a batch on several threads, without workers.

The script's own code runs in its own thread and draws its random numbers in its own order; only what it asks of pixels
is done later, by whichever thread has time (`flatout.frameworks.pytorch.input.pixels`). The batches are bit for bit
the same, and a share of them is computed both ways for as long as the script runs.
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


class PixelThreads(Lever):
    """The pixel work of a batch on several threads."""

    name = "pixel_threads"
    summary = "images decoded, cropped, resized and normalized by several threads of the training process"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "step"
    check = "batches"
    checks_itself = True
    conflicts: ClassVar = ("workers",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader without workers whose dataset opens images, by code that is known to do nothing else."""
        return why_none([loader.why_not_pixel_threads for loader in facts.loaders])

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next fetch on."""
        session.loaders.engage("pixels", True)

    def release(self, session: Session) -> None:
        """On the training's thread again."""
        session.loaders.engage("pixels", False)

    def evidence(self, session: Session) -> str | None:
        """Batches that were fetched so."""
        num = session.loaders.pipeline.pixels.num_batches
        return f"{num:,} batches whose pixel work was done on threads" if num else None
