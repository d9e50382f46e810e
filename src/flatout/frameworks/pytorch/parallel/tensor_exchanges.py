"""What do ranks exchange that each compute some features of a layer, or some positions between such layers?

Each function is one node of a call's graph; its way back is the other's way forward. In: tensors that are the same on
all ranks, or parts of one. Out: the other.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (`f` and `g`); for positions Korthikanti et al., arXiv 2205.05198,
section 4.2.2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group, lengthened

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


def joined(
    part: torch.Tensor, group: Group, edges: Sequence[int], dim: int, name: str = "features of a divided layer"
) -> torch.Tensor:
    """Ranks have a piece each of what all are to have, features or positions; all ranks go on with it alike."""
    return _made(part, lambda x: group.joined(x, edges, dim, name), lambda grad: _piece(grad, group, edges, dim))


def cut(whole: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    """What is the same on all ranks enters layers of which each rank computes a piece of the positions."""
    back = functools.partial(group.joined, edges=edges, dim=dim, name="gradients of positions")
    return _made(whole, lambda x: _piece(x, group, edges, dim).contiguous(), back)


def gathered(part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    """Pieces of positions enter layers of which each rank has some features, whose gradients are summed."""
    there = functools.partial(group.joined, edges=edges, dim=dim, name="positions for a divided layer")
    return _made(part, there, lambda grad: _summed_piece(grad, group, edges, dim, "gradient of a divided layer"))


def scattered(part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    """Ranks have computed with some of the features each: the sum of what they found, for this rank's positions."""
    back = functools.partial(group.joined, edges=edges, dim=dim, name="gradients of positions")
    return _made(part, lambda x: _summed_piece(x, group, edges, dim, "sum of a divided layer"), back)


def _summed(tensor: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    return group.sum(tensor.clone(memory_format=torch.contiguous_format), name)


def _piece(whole: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    return whole.narrow(dim, edges[group.rank], edges[group.rank + 1] - edges[group.rank])


def _summed_piece(whole: torch.Tensor, group: Group, edges: Sequence[int], dim: int, name: str) -> torch.Tensor:
    """This rank's piece, along a dimension, of the sum over ranks."""
    sizes = [high - low for low, high in itertools.pairwise(edges)]
    rows = torch.stack([lengthened(one, max(sizes), dim) for one in whole.split(sizes, dim)])
    return group.scatter_sum(rows, name).narrow(dim, 0, sizes[group.rank])
