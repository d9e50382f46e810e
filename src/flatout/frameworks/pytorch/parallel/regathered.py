"""How is a tensor of all positions not kept for the way back, where its pieces are?

In its place a graph keeps this rank's piece; the way back gathers it again, which all ranks do in the same order. In: a
gathered tensor and its pieces. Out: a context for what computes with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.tensor_exchanges import put_together


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
