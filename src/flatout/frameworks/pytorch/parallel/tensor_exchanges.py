"""What do ranks exchange that each compute some features of a layer?

Each function is one node of a call's graph; its way back is the other's way forward. In: tensors that are the same on
all ranks, or parts of one. Out: the other.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (`f` and `g`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group

Way = Callable[[torch.Tensor], torch.Tensor]


class _Exchange(torch.autograd.Function):
    """One way forwards, another one back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        """There."""
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """And back."""
        return ctx.back(grad), None, None


def _made(tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    found: torch.Tensor = _Exchange.apply(tensor, there, back)
    return found


def entering(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """What is the same on all ranks enters layers that are divided: gradients of all ranks' features are summed."""
    return _made(whole, lambda x: x.view_as(x), lambda grad: _summed(grad, group, "gradient of a divided layer"))


def summed(part: torch.Tensor, group: Group) -> torch.Tensor:
    """Ranks have computed with some of the features each: the sum of what they found."""
    return _made(part, lambda x: _summed(x, group, "sum of a divided layer"), lambda grad: grad)


def joined(part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    """Ranks have some of the features each that all are to have; all ranks go on with them alike."""
    rank, name = group.rank, "features of a divided layer"
    mine = edges[rank], edges[rank + 1] - edges[rank]
    return _made(part, lambda x: group.joined(x, edges, dim, name), lambda grad: grad.narrow(dim, *mine))


def _summed(tensor: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    return group.sum(tensor.clone(memory_format=torch.contiguous_format), name)
