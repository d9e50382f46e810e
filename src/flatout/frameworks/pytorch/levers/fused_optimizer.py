"""fused_optimizer: one kernel for the whole update of a parameter instead of one per arithmetic operation.

The user's optimizer object stays: flags in its groups change while it updates, and are the user's own between.
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


class FlagOfUpdates(Lever):
    """A flag of PyTorch's optimizers, in the updates of those that can have it."""

    shortens: ClassVar = ("optimizer",)
    class_ = "rounding"
    check = "updates"
    needs_whole_parameters = True
    flag: ClassVar[str]
    shown: ClassVar[str]
    """What optimizers that have the flag do, as evidence says it."""

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set the flag in each update."""
        from flatout.frameworks.pytorch.seams import optimizers

        can = {"fused": optimizers.can_fuse, "foreach": optimizers.can_foreach}[self.flag]
        for optimizer in filter(can, session.optimizers):
            session.flags.engage(optimizer, {self.flag: True})

    def release(self, session: Session) -> None:
        """Update as the script says."""
        session.flags.release(self.flag)

    def evidence(self, session: Session) -> str | None:
        """Updates that carried the flag."""
        num, updates = session.flags.num_optimizers(self.flag), session.flags.num_updates
        found = f"{num} of {len(session.optimizers)} optimizers {self.shown} in {updates} updates"
        return found if num * updates else None


class FusedOptimizer(FlagOfUpdates):
    """`fused=True` on optimizers that have it."""

    name = "fused_optimizer"
    summary = "the optimizer's update in one kernel per parameter"
    moves_state = True
    conflicts: ClassVar = ("foreach_optimizer",)
    flag = "fused"
    shown = "fused"

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
