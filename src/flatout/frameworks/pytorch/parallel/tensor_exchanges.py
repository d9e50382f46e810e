"""What do ranks exchange that each compute some features of a layer?

Each function is one node of a call's graph; its way back is the other's way forward. In: tensors that are the same on
all ranks, or parts of one. Out: the other.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (`f` and `g`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group


class Entering(torch.autograd.Function):
    """What is the same on all ranks enters layers that are divided: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Group) -> torch.Tensor:
        """As it is."""
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Of all ranks' features."""
        return ctx.group.sum(grad.clone(memory_format=torch.contiguous_format), "gradient of a divided layer"), None


class Summed(torch.autograd.Function):
    """Ranks have computed with some of the features each: the sum of what they found."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum."""
        return group.sum(part.clone(memory_format=torch.contiguous_format), "sum of a divided layer")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """As it is."""
        return grad, None


class Joined(torch.autograd.Function):
    """Ranks have computed some of the features each: all of them, along a dimension."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
        """All features."""
        ctx.place = dim, edges[group.rank], edges[group.rank + 1] - edges[group.rank]
        sizes = [high - low for low, high in itertools.pairwise(edges)]
        longest = max(sizes)
        if part.shape[dim] < longest:
            shape = list(part.shape)
            shape[dim] = longest - part.shape[dim]
            part = torch.cat([part, part.new_zeros(shape)], dim)
        rows = group.gather(part, "features of a divided layer")
        return torch.cat([row.narrow(dim, 0, size) for row, size in zip(rows, sizes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Of this rank's features."""
        return grad.narrow(*ctx.place), None, None, None
