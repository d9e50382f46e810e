"""foreach_optimizer: one call over all parameters for each arithmetic operation of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.ceilings import Machine
from flatout.plan import Lever
from flatout.trace import Facts, Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class ForeachOptimizer(Lever):
    """`foreach=True` where a fused update is not to be had."""

    name = "foreach_optimizer"
    summary = "the optimizer's arithmetic over all parameters in one call each"
    class_ = "rounding"
    shortens: ClassVar = ("optimizer",)
    check = "updates"
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
        """Set the flags."""
        from flatout.frameworks.pytorch.optimizers import can_foreach, set_flags

        session.kept[self.name] = [
            set_flags(optimizer, foreach=True) for optimizer in session.optimizers if can_foreach(optimizer)
        ]

    def release(self, session: Session) -> None:
        """Give each optimizer its own flags back."""
        for restore in session.kept.pop(self.name):
            restore()

    def evidence(self, session: Session) -> str | None:
        """Groups that carry the flag."""
        num = sum(any(group.get("foreach") for group in o.param_groups) for o in session.optimizers)
        return f"{num} of {len(session.optimizers)} optimizers use foreach" if num else None
