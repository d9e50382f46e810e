"""What do ranks exchange that each compute some features of a layer, or some positions between such layers?

Each function is one node of a call's graph; its way back is the other's way forward. In: tensors that are the same on
all ranks, or parts of one. Out: the other.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (`f` and `g`); for positions Korthikanti et al., arXiv 2205.05198,
section 4.2.2.
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
    """Ranks have a piece each of what all are to have, along a dimension: features of a layer, or positions."""

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        group: Group,
        edges: Sequence[int],
        dim: int,
        name: str = "features of a divided layer",
    ) -> torch.Tensor:
        """All pieces."""
        ctx.place = dim, edges[group.rank], edges[group.rank + 1] - edges[group.rank]
        return put_together(part, group, edges, dim, name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Of this rank's piece: all ranks have gone on alike."""
        return grad.narrow(*ctx.place), None, None, None, None


class Cut(torch.autograd.Function):
    """What is the same on all ranks enters layers of which each rank computes a piece of the positions."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
        """This rank's piece."""
        ctx.group, ctx.edges, ctx.dim = group, edges, dim
        return whole.narrow(dim, edges[group.rank], edges[group.rank + 1] - edges[group.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Of all pieces."""
        return put_together(grad, ctx.group, ctx.edges, ctx.dim, "gradients of positions"), None, None, None


class Gathered(torch.autograd.Function):
    """Pieces of positions enter layers of which each rank has some features."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
        """All positions."""
        ctx.group, ctx.edges, ctx.dim = group, edges, dim
        return put_together(part, group, edges, dim, "positions for a divided layer")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Of this rank's positions, of all ranks' features."""
        return _summed_piece(grad, ctx.group, ctx.edges, ctx.dim, "gradient of a divided layer"), None, None, None


class Scattered(torch.autograd.Function):
    """Ranks have computed with some of the features each: the sum of what they found, for this rank's positions."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
        """This rank's positions of the sum."""
        ctx.group, ctx.edges, ctx.dim = group, edges, dim
        return _summed_piece(part, group, edges, dim, "sum of a divided layer")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Of all positions."""
        return put_together(grad, ctx.group, ctx.edges, ctx.dim, "gradients of positions"), None, None, None


def put_together(part: torch.Tensor, group: Group, edges: Sequence[int], dim: int, name: str) -> torch.Tensor:
    """The pieces of all ranks along a dimension; they are sent as long as the longest of them."""
    sizes = [high - low for low, high in itertools.pairwise(edges)]
    rows = group.gather(_lengthened(part, max(sizes), dim), name)
    return torch.cat([row.narrow(dim, 0, size) for row, size in zip(rows, sizes, strict=True)], dim)


def _summed_piece(whole: torch.Tensor, group: Group, edges: Sequence[int], dim: int, name: str) -> torch.Tensor:
    """This rank's piece, along a dimension, of the sum over ranks."""
    sizes = [high - low for low, high in itertools.pairwise(edges)]
    rows = torch.stack([_lengthened(one, max(sizes), dim) for one in whole.split(sizes, dim)])
    return group.scatter_sum(rows, name).narrow(dim, 0, sizes[group.rank])


def _lengthened(part: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """With zeros behind it, where it is shorter along a dimension."""
    if part.shape[dim] == length:
        return part
    shape = list(part.shape)
    shape[dim] = length - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)
