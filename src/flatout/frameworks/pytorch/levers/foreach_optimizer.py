"""foreach_optimizer: one call over all parameters for each arithmetic operation of the update."""

from __future__ import annotations

from typing import ClassVar

from flatout.frameworks.pytorch.levers.fused_optimizer import FlagOfUpdates
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts


class ForeachOptimizer(FlagOfUpdates):
    """`foreach=True` where a fused update is not to be had."""

    name = "foreach_optimizer"
    summary = "the optimizer's arithmetic over all parameters in one call each"
    takes_memory = True
    conflicts: ClassVar = ("fused_optimizer",)
    flag = "foreach"
    shown = "use foreach"

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
