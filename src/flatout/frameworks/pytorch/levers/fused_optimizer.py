"""fused_optimizer: one kernel for the whole update of a parameter instead of one per arithmetic operation.

The user's optimizer object stays: flags in its groups change while it updates, and are the user's own between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class FusedOptimizer(Lever):
    """`fused=True` on optimizers that have it."""

    name = "fused_optimizer"
    summary = "the optimizer's update in one kernel per parameter"
    class_ = "rounding"
    shortens: ClassVar = ("optimizer",)
    check = "updates"
    moves_state = True
    needs_whole_parameters = True
    conflicts: ClassVar = ("foreach_optimizer",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Optimizers that can and do not yet."""
        if not facts.optimizers:
            return "no optimizer was seen"
        if all(optimizer.fused for optimizer in facts.optimizers):
            return "already fused"
        if not any(optimizer.can_fuse and not optimizer.fused for optimizer in facts.optimizers):
            return f"{facts.optimizers[0].name} has no fused update"
        if facts.grad_scaler:
            return "a gradient scaler is in use, whose protocol with a fused update is not ours to change"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set the flag in each update."""
        from flatout.frameworks.pytorch.seams.optimizers import can_fuse

        for optimizer in session.optimizers:
            if can_fuse(optimizer):
                session.flags.engage(optimizer, {"fused": True})

    def release(self, session: Session) -> None:
        """Update as the script says."""
        session.flags.release("fused")

    def evidence(self, session: Session) -> str | None:
        """Updates that carried the flag."""
        num = session.flags.num_optimizers("fused")
        if not num or not session.flags.num_updates:
            return None
        return f"{num} of {len(session.optimizers)} optimizers fused in {session.flags.num_updates} updates"
