"""Which part of a tensor does each rank hold?

A dimension is cut into as many pieces as there are ranks, of equal length or not; or it is made of blocks (queries,
keys and values in one matrix), each of which is cut so. In: a shape and where to cut. Out: a rank's part of a whole
tensor, and the whole from the parts of all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided

REPLICATE = "`--mode replicate` keeps whole parameters on every rank"


def chunked(size: int, world: int) -> tuple[int, ...]:
    """Where the pieces begin and end that `torch.chunk` makes.

    >>> chunked(10, 4), chunked(2, 3)
    ((0, 3, 6, 9, 10), (0, 1, 2, 2))
    """
    each = -(-size // world)
    return tuple(min(each * rank, size) for rank in range(world + 1))


@dataclass(frozen=True, eq=False, slots=True)
class Portions:
    """How a tensor is cut.

    Attributes:
        shape: Of the whole.
        group: The ranks that share it.
        refuse: Told of what cannot be done with a part; it ends the run.
        edges: Where each rank's piece begins within a block, and where the last one's ends.
        number: Of the parameter, the same on all ranks: what they ask for in one exchange is compared.
        dim: The dimension that is cut.
        blocks: So many equal blocks make up that dimension.
    """

    shape: torch.Size
    group: Group
    refuse: Callable[[NotDivided], Any]
    edges: tuple[int, ...]
    number: int = 0
    dim: int = 0
    blocks: int = 1

    @property
    def part_shape(self) -> torch.Size:
        """Of this rank's part."""
        return self._shape_of(self._size(self.group.rank))

    def is_alike(self, other: Portions) -> bool:
        """Whether parts of two tensors go together, element by element."""
        return self is other or (
            (self.shape, self.edges, self.dim, self.blocks) == (other.shape, other.edges, other.dim, other.blocks)
            and self.group.ranks == other.group.ranks
        )

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: a view where there is one."""
        low, size = self.edges[self.group.rank], self._size(self.group.rank)
        if self.blocks == 1:
            return whole.narrow(self.dim, low, size)
        return whole.unflatten(self.dim, (self.blocks, -1)).narrow(self.dim + 1, low, size).flatten(
            self.dim, self.dim + 1
        )  # fmt: skip

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole from the parts of all ranks; every rank must ask for it, at the same time."""
        self._refuse_threads()
        tag = torch.tensor([self.number, self.shape.numel()], device=part.device)
        owner = self._owner()
        if owner is not None:
            self.compare(self.group.gather(tag, "gathering of a parameter"))
            whole = part.detach().clone() if owner == self.group.rank else part.new_empty(self.shape)
            return self.group.broadcast(whole.contiguous(), "gathering of a parameter", source=owner)
        longest = max(self._size(rank) for rank in range(self.group.world))
        padded = part.new_zeros(self._shape_of(longest))
        self._narrowed(padded, self._size(self.group.rank)).copy_(self._in_blocks(part))
        sent = torch.cat([tag.view(torch.uint8), padded.view(-1).view(torch.uint8)])
        every = self.group.gather(sent, "gathering of a parameter")
        num = tag.numel() * tag.element_size()
        self.compare(every[:, :num])
        rows = every[:, num:].contiguous().view(part.dtype).view(-1, *padded.shape)
        pieces = [self._narrowed(row, self._size(rank)) for rank, row in enumerate(rows)]
        return torch.cat(pieces, self.dim + 1).flatten(self.dim, self.dim + 1)

    def compare(self, tags: torch.Tensor) -> None:
        """Make sure that all ranks have asked for the same."""
        if not bool((tags == tags[0]).all()):
            self.refuse(
                NotDivided(
                    "ranks ask for different parameters at the same time",
                    cause="the script goes through them in an order that depends on the process (a set, the time)",
                    hint=REPLICATE,
                )
            )

    def _refuse_threads(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.refuse(
                NotDivided(
                    "a thread of the script's asks for a sharded parameter",
                    cause="all ranks gather it together, and threads do not come in the same order everywhere",
                    hint="copy what a thread is to save to whole tensors before (`copy.deepcopy`); or " + REPLICATE,
                )
            )

    def _size(self, rank: int) -> int:
        return self.edges[rank + 1] - self.edges[rank]

    def _owner(self) -> int | None:
        """The rank that has all of it; None where it is shared."""
        has = [rank for rank in range(self.group.world) if self._size(rank)]
        return has[0] if len(has) == 1 and self.group.world > 1 else None

    def _shape_of(self, size: int) -> torch.Size:
        return torch.Size((*self.shape[: self.dim], self.blocks * size, *self.shape[self.dim + 1 :]))

    def _in_blocks(self, part: torch.Tensor) -> torch.Tensor:
        return part.unflatten(self.dim, (self.blocks, part.shape[self.dim] // self.blocks))

    def _narrowed(self, padded: torch.Tensor, size: int) -> torch.Tensor:
        """The first `size` of each block of a part that was made longer."""
        return self._in_blocks(padded).narrow(self.dim + 1, 0, size)


def in_rows(shape: Sequence[int], group: Group, refuse: Callable[[NotDivided], Any], number: int = 0) -> Portions:
    """Cut along the first dimension, as `torch.chunk` does."""
    return Portions(torch.Size(shape), group, refuse, chunked(shape[0], group.world), number)
