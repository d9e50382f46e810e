"""checkpoints: `torch.save` to a path copies what it is given and writes it while the training goes on.

The file is byte for byte the one that plain writes, and is put in its place when it is whole, so that a process that is
killed leaves the former one. It needs memory for a copy of what is saved. `torch.load`, `open`, listing, renaming,
removing and copying by Python wait for it, as do programs that are started and the end of the process; `os.path.exists`
and libraries that open files by themselves do not. Where a file could not be written the former one stays, and the
next `torch.save` raises why, or, where there is none, the process shows it at its end and fails. A folder that is
missing or a path that may not be written is told at once. The disk has to hold both files for a moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class Checkpoints(Lever):
    """`torch.save` in the background."""

    name = "checkpoints"
    summary = "checkpoints written while the training goes on"
    class_ = "exact"
    shortens: ClassVar = ("checkpoint",)
    check = "none"
    needs_whole_parameters = True
    only_by_name = "a process that is killed loses the checkpoint that was being written"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Every script; whether it saves with `torch.save` shows when it does."""
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next `torch.save` on."""
        from flatout.frameworks.pytorch.seams.background_saves import BackgroundSaves

        if _SAVES not in session.kept:  # one for the process: what it asks of Python stays
            session.kept[_SAVES] = BackgroundSaves()
        session.kept[_SAVES].install()

    def release(self, session: Session) -> None:
        """As plain again, when what is under way is written."""
        if _SAVES in session.kept:
            session.kept[_SAVES].remove()

    def evidence(self, session: Session) -> str | None:
        """Checkpoints that were written so."""
        num = session.kept[_SAVES].num_written
        return f"{num} checkpoint{'s' * (num != 1)} written in the background" if num else None


_SAVES = "checkpoints: writer"
