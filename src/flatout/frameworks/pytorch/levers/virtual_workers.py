"""virtual_workers: build in this process what the script's workers would build.

Where items are small, workers hurt: handing a batch from a process to another costs more than computing it, which is
done at once where it is known what the dataset computes. Each worker's random stream is kept apart. Like each worker,
it has a copy of the dataset, made when the workers would begin; items that read settings outside it are left to
workers. Only what the training writes into an array in place is seen here at once, and by workers late or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flatout.frameworks.pytorch.lever_bases import LoaderLever
from flatout.records.trace import Setting


class VirtualWorkers(LoaderLever):
    """The script's workers, without processes."""

    name = "virtual_workers"
    summary = "what the script's workers build computed at once, without workers"
    toggles = "epoch"
    conflicts: ClassVar = ("workers",)
    part = "fused"

    def serves_workers(self, loader: Any) -> bool:
        """In their place."""
        return True

    def engage(self, session: Any, settings: Mapping[str, Setting]) -> None:
        """From the next pass on (in a trial from the next fetch on)."""
        session.loaders.num_changed = 0
        session.loaders.set(in_process=True)

    def release(self, session: Any) -> None:
        """Back to the script's workers."""
        session.loaders.unset("in_process")

    def evidence(self, session: Any) -> str | None:
        """Passes that were opened so."""
        num = session.loaders.num_changed
        return f"{num} {'pass' if num == 1 else 'passes'} without the script's workers" if num else None
