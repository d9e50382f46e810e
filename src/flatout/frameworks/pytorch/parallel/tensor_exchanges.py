"""What do ranks exchange that each compute some features of a layer, or some positions between such layers?

Each function is one node of a call's graph; its way back is the other's way forward. A tensor of all positions is not
kept for the way back, where its pieces are: a graph keeps this rank's piece, and gathers again, which all ranks do in
the same order. In: tensors that are the same on all ranks, or parts of one. Out: the other.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (`f` and `g`); for positions Korthikanti et al., arXiv 2205.05198,
section 4.2.2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


def joined(
    part: torch.Tensor, group: Group, edges: Sequence[int], dim: int, name: str = "features of a divided layer"
) -> torch.Tensor:
    """Ranks have a piece each of what all are to have, features or positions; all ranks go on with it alike."""
    return _made(part, lambda x: put_together(x, group, edges, dim, name), lambda grad: _piece(grad, group, edges, dim))


def cut(whole: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    """What is the same on all ranks enters layers of which each rank computes a piece of the positions."""
    back = functools.partial(put_together, group=group, edges=edges, dim=dim, name="gradients of positions")
    return _made(whole, lambda x: _piece(x, group, edges, dim).contiguous(), back)


def gathered(part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    """Pieces of positions enter layers of which each rank has some features, whose gradients are summed."""
    there = functools.partial(put_together, group=group, edges=edges, dim=dim, name="positions for a divided layer")
    return _made(part, there, lambda grad: _summed_piece(grad, group, edges, dim, "gradient of a divided layer"))


def scattered(part: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    """Ranks have computed with some of the features each: the sum of what they found, for this rank's positions."""
    back = functools.partial(put_together, group=group, edges=edges, dim=dim, name="gradients of positions")
    return _made(part, lambda x: _summed_piece(x, group, edges, dim, "sum of a divided layer"), back)


def _summed(tensor: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    return group.sum(tensor.clone(memory_format=torch.contiguous_format), name)


def _piece(whole: torch.Tensor, group: Group, edges: Sequence[int], dim: int) -> torch.Tensor:
    return whole.narrow(dim, edges[group.rank], edges[group.rank + 1] - edges[group.rank])


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


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What a gathered tensor was put together from.

    Attributes:
        mine: This rank's piece.
        edges: Where pieces begin and end.
        dim: Along which dimension.
    """

    mine: torch.Tensor
    edges: Sequence[int]
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """What a graph keeps in the place of a view of a gathered tensor."""

    pieces: Pieces
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Regathered:
    """The gathered tensors of some blocks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known: dict[int, tuple[torch.Tensor, Pieces]] = {}
        self._last: tuple[Pieces, torch.Tensor] | None = None

    def add(self, whole: torch.Tensor, pieces: Pieces) -> None:
        """A tensor was gathered. It lives until `forget`, so that no other one has its place in memory."""
        self._known[whole.untyped_storage().data_ptr()] = whole.detach(), pieces

    def forget(self) -> None:
        """Nothing computes with what was gathered any more."""
        self._known.clear()

    def clear(self) -> None:
        """A way back is over."""
        self.forget()
        self._last = None

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Within, graphs keep pieces. Where somebody else decides what graphs keep (a checkpoint), he goes on to."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # type: ignore[attr-defined]
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
            yield

    def _packed(self, tensor: torch.Tensor) -> Any:
        known = self._known.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        if known is None:
            return tensor
        return _View(known[1], tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpacked(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _View):
            found: torch.Tensor = kept
            return found
        pieces = kept.pieces
        if self._last is None or self._last[0] is not pieces:
            whole = put_together(pieces.mine, self._group, pieces.edges, pieces.dim, "positions, for the way back")
            self._last = pieces, whole
        return self._last[1].as_strided(kept.size, kept.stride, kept.offset)
