"""read_ahead: read the files that the next batches open, from slow storage, before the script opens them.

PyTorch's own samplers say a few batches early which items come next, and lists of names in the dataset say which files
they open; nothing of the script's is run. A file that was read in vain costs time and nothing else. Files that are in
memory already are left alone. It helps loaders with workers of their own as well.
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


class ReadAhead(Lever):
    """Files are read before they are opened."""

    name = "read_ahead"
    summary = "files of the next batches read into memory before they are opened, from slow storage"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "step"
    check = "batches"
    checks_itself = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose dataset has a list of file names, some of which take a while to read."""
        return why_none([loader.refusal(self.name) for loader in facts.loaders])

    def why_not(self, session: Session, loader: DataLoader[Any]) -> str | None:
        """Reading the files of its next batches ahead would bring nothing."""
        return session.loaders.why_not(lambda parts: parts.files, loader, for_workers=False)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next batch on."""
        session.loaders.pipeline.files.engage(True)
        session.loaders.attach()

    def release(self, session: Session) -> None:
        """No more files are read; those that were stay in the kernel's memory as long as it likes."""
        session.loaders.pipeline.files.engage(False)

    def evidence(self, session: Session) -> str | None:
        """Files that were read ahead and were not in memory."""
        num = session.loaders.pipeline.files.num_files
        return f"{num:,} files read ahead" if num else None
