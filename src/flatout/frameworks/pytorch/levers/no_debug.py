"""no_debug: anomaly detection, deterministic algorithms, disabled oneDNN or cuDNN, switched back to what is usual.

Anomaly detection stays off also where the script enters `torch.autograd.detect_anomaly()` anew in each step. What is
set by an environment variable, or a profiler that runs, stays: `flatout why` names it.
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


class NoDebug(Lever):
    """What somebody switched on to find an error, off."""

    name = "no_debug"
    summary = "what is switched on for debugging switched off"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "loss", "backward", "optimizer")
    check = "gradients"
    only_by_name = "somebody may want what is checked"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A script that has such a switch on."""
        return None if facts.debug_switches else "no such switch is on"

    def frees(self, facts: Facts, machine: Machine) -> Mapping[str, Mapping[str, Setting]]:
        """What the switches that are on take."""
        return {"debugging_off": {}} if facts.debug_switches else {}

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """All of them off."""
        from flatout.frameworks.pytorch.seams.debug_switches import Off

        session.kept[self.name] = Off(session.device)

    def release(self, session: Session) -> None:
        """As the script set them."""
        if self.name in session.kept:
            session.kept.pop(self.name).release()

    def evidence(self, session: Session) -> str | None:
        """What was turned off."""
        names = sorted(session.kept[self.name].names)
        return f"off: {', '.join(names)}" if names else None
