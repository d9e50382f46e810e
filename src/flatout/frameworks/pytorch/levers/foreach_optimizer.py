"""foreach_optimizer: one call over all parameters for each arithmetic operation of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class ForeachOptimizer(Lever):
    """`foreach=True` where a fused update is not to be had."""

    name = "foreach_optimizer"
    summary = "the optimizer's arithmetic over all parameters in one call each"
    class_ = "rounding"
    shortens: ClassVar = ("optimizer",)
    check = "updates"
    needs_whole_parameters = True
    takes_memory = True
    conflicts: ClassVar = ("fused_optimizer",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Optimizers that have the flag, have no fused update, and do not use it yet."""
        if not facts.optimizers:
            return "no optimizer was seen"
        if facts.device != "cpu":
            return "the default on a GPU"
        if all(optimizer.can_fuse or optimizer.fused for optimizer in facts.optimizers):
            return "a fused update is there, which does more"
        if all(optimizer.foreach for optimizer in facts.optimizers):
            return "already so"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set the flag in each update."""
        from flatout.frameworks.pytorch.seams.optimizers import can_foreach

        for optimizer in session.optimizers:
            if can_foreach(optimizer):
                session.flags.engage(optimizer, {"foreach": True})

    def release(self, session: Session) -> None:
        """Update as the script says."""
        session.flags.release("foreach")

    def evidence(self, session: Session) -> str | None:
        """Updates that carried the flag."""
        num = session.flags.num_optimizers("foreach")
        if not num or not session.flags.num_updates:
            return None
        return f"{num} of {len(session.optimizers)} optimizers use foreach in {session.flags.num_updates} updates"
