"""How is a divided call one node of the script's graph?

In: a call, which knows how it is computed and gone back through. Out: its outputs, which hang from its inputs and from
the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flatout.frameworks.pytorch.parallel.pattern import Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.seams.trees import map_tensors

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.division import Division


class NodeCall:
    """A divided call, between its way forward and its way back."""

    def __init__(self, division: Division, pattern: Pattern) -> None:
        self.division, self.pattern = division, pattern
        self.value: Any = None
        """What the module returned here, until it was rebuilt."""
        self.mine: list[torch.Tensor] = []
        """The tensors in it."""

    def forward(self) -> list[torch.Tensor]:
        """Compute: the outputs for the script, one for each of `mine`."""
        raise NotImplementedError

    def gone_back(self, gradients: Sequence[Any], *, keep: bool) -> list[Any]:
        """The gradients of the inputs that want one, and of the parameters; `keep`: it is gone through again."""
        raise NotImplementedError

    def compared(self, gradients: Sequence[Any]) -> None:
        """Compare the gradients of a call that was computed both ways, by those of its outputs."""
        raise NotImplementedError

    def made(self, *tensors: torch.Tensor) -> Any:
        """Make the call: what the module returns to the script, hanging from the given tensors."""
        outputs = _Node.apply(self, *tensors)
        by_id = {id(mine): whole for mine, whole in zip(self.mine, outputs, strict=True)}
        value, self.value = self.value, None
        return map_tensors(lambda tensor: by_id[id(tensor)], value)


class _Node(torch.autograd.Function):
    """The node."""

    @staticmethod
    def forward(ctx: Any, call: NodeCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the whole batch."""
        outputs = call.forward()
        ctx.call = call
        fixed = [whole for whole, mine in zip(outputs, call.mine, strict=True) if not mine.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        """Gradients of the inputs and of the parameters."""
        call: NodeCall = ctx.call
        try:
            if torch.is_grad_enabled():
                raise call.division.refused("gradients of its gradients are taken (`create_graph=True`)")
            call.pattern.taken = tuple(one is not None for one in gradients)
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            with call.division.apart():
                return (None, *call.gone_back(gradients, keep=keep))
        except NotDivided as problem:
            call.division.refuse(problem)
