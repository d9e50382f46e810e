"""Which part of a batch is a rank's, and where in a call's inputs is the batch?

A batch's dimension is guessed: most often one that many inputs share, the first before the second. Whether a guess is
right is found by computing the call both ways (`division.py`). In: the tensors of a call's inputs. Out: guesses, and
a rank's part of each tensor. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.trees import map_tensors

Tensors = Sequence[torch.Tensor]

MOST_GUESSES = 8
"""Places of the batch that are tried for one kind of call."""


def bounds(num: int, world: int) -> list[int]:
    """Where the parts of `num` samples begin and end: rank r has those from `bounds[r]` to `bounds[r + 1]`.

    >>> bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [num * rank // world for rank in range(world + 1)]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the batch lies in the inputs of a call."""

    dims: tuple[int | None, ...]
    """For each tensor of the inputs the dimension that counts samples; None for one that every rank gets whole."""

    def num_samples(self, tensors: Tensors) -> int | None:
        """Samples of a call; None where its inputs do not agree on it."""
        found = {t.shape[dim] for t, dim in zip(tensors, self.dims, strict=True) if dim is not None and dim < t.dim()}
        short = any(dim is not None and dim >= t.dim() for t, dim in zip(tensors, self.dims, strict=True))
        return found.pop() if len(found) == 1 and not short else None


def guesses(tensors: Tensors, world: int) -> list[Cut]:
    """Where the batch may lie, the likeliest first; none where no dimension is long enough to be divided.

    >>> images, labels = torch.zeros(8, 3, 16, 16), torch.zeros(8)
    >>> guesses([images, labels], 2)[0]
    Cut(dims=(0, 0))
    """
    found: list[Cut] = []
    for size in _sizes(tensors, world):
        of_once = Cut(tuple(_place(t, size) if list(t.shape).count(size) == 1 else None for t in tensors))
        of_all = Cut(tuple(_place(t, size) for t in tensors))
        of_first = Cut(tuple(None if number else _place(t, size) for number, t in enumerate(tensors)))
        from_last = Cut(tuple(_place(t, size, reverse=True) for t in tensors))
        for cut in (of_once, of_all, from_last, of_first):  # a mask of (size, size) seldom counts samples
            if cut not in found and any(dim is not None for dim in cut.dims):
                found.append(cut)
    return found[:MOST_GUESSES]


def _sizes(tensors: Tensors, world: int) -> list[int]:
    """Sizes that may count samples: those of most tensors first, and among them those of early dimensions."""
    rank_of: dict[int, tuple[int, int]] = {}
    for size in {size for t in tensors for size in t.shape if size >= world and size > 1}:
        places = [list(t.shape).index(size) for t in tensors if size in t.shape]
        rank_of[size] = (-len(places), min(places))
    return sorted(rank_of, key=lambda size: (*rank_of[size], size))


def _place(tensor: torch.Tensor, size: int, *, reverse: bool = False) -> int | None:
    dims = [dim for dim, length in enumerate(tensor.shape) if length == size]
    return None if not dims else dims[-1] if reverse else dims[0]


def part(tensor: torch.Tensor, dim: int, low: int, high: int) -> torch.Tensor:
    """Samples `low` to `high`, laid out as the whole is."""
    cut = tensor.narrow(dim, low, high - low)
    return cut.contiguous() if tensor.is_contiguous() and not cut.is_contiguous() else cut


def part_entering(args: Any, kwargs: Any, share: Any, rank: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """`entering` with a rank's samples alone; `share` tells which (`assembly.Share`)."""
    low, high = share.edges[rank], share.edges[rank + 1]

    def cut(dim: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda whole: whole if dim is None else part(whole, dim, low, high)

    return entering(args, kwargs, [cut(dim) for dim in share.dims])


def entering(
    args: Any, kwargs: Any, changes: Iterable[Callable[[torch.Tensor], torch.Tensor]]
) -> tuple[Any, Any, list[torch.Tensor]]:
    """Inputs of a call without what the script computed them from, and those that gradients are wanted of.

    `changes`: what each tensor of them enters as, in their order.
    """
    next_change = iter(changes)
    entered: list[torch.Tensor] = []

    def enter(tensor: torch.Tensor) -> torch.Tensor:
        change = next(next_change)
        if not tensor.requires_grad:
            return change(tensor)
        mine = change(tensor.detach()).detach().requires_grad_()
        entered.append(mine)
        return mine

    new_args, new_kwargs = map_tensors(enter, (args, kwargs), unique=False)
    return new_args, new_kwargs, entered
