"""checkpointing: compute the repeated blocks of a model again in the backward instead of keeping their activations.

Of each block only what goes in is kept (`torch.utils.checkpoint`, not reentrant); random generators stand in the second
computation where they stood in the first. That takes about a third more computation: by itself it saves memory and
no time, so it is not tried unless it is named. The memory that it leaves is the script's to use, for a larger batch or
model for example.

Blocks that change buffers (the running statistics of a BatchNorm) or their inputs, and blocks with hooks, are computed
as plain. What a block does to other objects, such as appending to a list, it does twice. Models that are not trained
are computed as plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class Checkpointing(Lever):
    """`torch.utils.checkpoint` around each repeated block."""

    name = "checkpointing"
    summary = "activations of repeated blocks computed again in the backward, not kept"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    needs_whole_parameters = True
    only_by_name = "it saves memory, and costs time by itself"
    conflicts: ClassVar = ("compile",)  # which decides by itself what it keeps, and has a seam in the same blocks

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A model with repeated blocks, which the script does not compile or distribute."""
        if facts.infers:
            return "nothing is trained: there is no backward pass to keep anything for"
        if not any(model.num_repeated_blocks for model in facts.main_models):
            return "no repeated blocks (three or more alike in one list or sequence)"
        if any(model.compiled for model in facts.main_models):
            return "the script compiles its model itself"
        if facts.distributed:
            return "distributed wrappers hook into the backward"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Put the other way to compute into each block."""
        from flatout.frameworks.pytorch.seams.blocks import BlockCall, repeated_blocks
        from flatout.frameworks.pytorch.seams.recomputation import Recomputed
        from flatout.frameworks.pytorch.session import Unavailable

        for call in session.calls.trained:
            if self.name not in call.kept:
                made = [(block, Recomputed()) for group in repeated_blocks(call.module) for block in group]
                call.kept[self.name] = [(BlockCall(block, other, session.calls), other) for block, other in made]
        before = [(seam, other, other.num_recomputed) for seam, other in _of(session)]
        if not before:
            raise Unavailable("no repeated blocks (three or more alike in one list or sequence)")
        session.kept[self.name] = before
        for seam, *_ in before:
            seam.install()

    def release(self, session: Session) -> None:
        """Blocks are computed as the script wrote them; a graph that exists goes backward as it was made."""
        session.kept.pop(self.name, None)
        for seam, _ in _of(session):
            seam.remove()

    def evidence(self, session: Session) -> str | None:
        """Blocks that were computed again in a backward."""
        before = session.kept.get(self.name, ())
        num = sum(other.num_recomputed > former for _, other, former in before)
        return f"{num} of {len(before)} blocks computed again in the backward" if num else None


def _of(session: Session) -> list[Any]:
    return [pair for call in session.calls.found for pair in call.kept.get(Checkpointing.name, ())]
