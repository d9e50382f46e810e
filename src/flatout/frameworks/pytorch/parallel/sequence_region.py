"""How do blocks compute with some positions of a sequence on each rank, between layers that are divided by features?

What enters the first block is cut, what leaves the last one is put together. In between, layers that are divided by
features gather the positions they are given, and keep this rank's of what they sum. Norms, dropout and what is added
are computed once then, not on every rank. In: blocks, and which inputs are cut. Out: their `forward`s, and what layers
within do instead.

Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel import tensor_exchanges
from flatout.frameworks.pytorch.parallel.cuts import bounds
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import REPLICATE
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

Key = tuple[int, str, int]
"""A module, whether given or returned, and the number of the tensor."""


def other_way(cause: str) -> NotDivided:
    """A block takes another way than when it was divided."""
    return NotDivided("blocks whose positions are divided take another way", cause=cause, hint=REPLICATE)


class Region:
    """Blocks that are called one after the other; the tensor of a number that the first one is given is cut.

    `scopes`: modules within that are given all positions: attention, of which layers are divided together. `shapes`: of
    whole tensors, in the call by which the region was found.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], number: int, dim: int, scopes: Sequence[nn.Module], group: Group,
        shapes: dict[Key, torch.Size],
    ) -> None:  # fmt: skip
        self.blocks, self.scopes = blocks, scopes
        self._number, self._dim, self._group, self._shapes = number, dim, group, shapes
        self._dims: dict[Key, int | None] = {}
        self._length = shapes[id(blocks[0]), "given", number][dim]
        self._lengths: set[int] = set()
        self._present: int | None = None
        """Along which dimension was cut what was gathered last."""
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._within = {id(inner) for scope in scopes for inner in scope.modules()}
        self._inner = {id(inner) for block in blocks for inner in block.modules()}

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._inner

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """What is computed with some positions, or some features: gradients of whole ones are ranks' own shares."""
        for block in self.blocks:
            yield from block.parameters()

    def forwards(
        self, draws: Callable[[], AbstractContextManager[None]]
    ) -> list[tuple[nn.Module, Callable[..., Any]]]:  # fmt: skip
        """What blocks and scopes compute instead; masks of dropout are drawn within `draws`."""
        blocks = [(block, self._block(block, draws)) for block in self.blocks]
        return [*blocks, *((scope, self._scope(scope)) for scope in self.scopes)]

    def _block(self, block: nn.Module, draws: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
        forward, is_first, is_last = type(block).forward, block is self.blocks[0], block is self.blocks[-1]

        def computed(*args: Any, **kwargs: Any) -> Any:
            if is_first:
                args, kwargs = self._cut(args, kwargs)
            with draws():  # one block may be computed anew by itself, with what it has drawn
                value = forward(block, *args, **kwargs)
            self._last = None
            numbers = itertools.count()

            def whole(tensor: torch.Tensor) -> torch.Tensor:
                dim = self._dim_of((id(block), "returned", next(numbers)), tensor)
                if dim is None:
                    return tensor
                return tensor_exchanges.joined(tensor, self._group, self._edges(), dim, "positions")

            return map_tensors(whole, value) if is_last else value

        return computed

    def _cut(self, args: Any, kwargs: Any) -> Any:
        whole = tensors_of((args, kwargs))[self._number]
        self._length = whole.shape[self._dim]
        if torch._C._current_graph_task_id() == -1:
            self._lengths.add(self._length)
        mine = tensor_exchanges.cut(whole, self._group, self._edges(), self._dim)
        return map_tensors(lambda one: mine if one is whole else one, (args, kwargs))

    def _scope(self, scope: nn.Module) -> Callable[..., Any]:
        forward = type(scope).forward

        def computed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.gathered(scope, (args, kwargs))
            return forward(scope, *args, **kwargs)

        return computed

    def gathered(self, module: nn.Module, given: Any) -> Any:
        """All positions of what a module is given; it computes some features of them, whose gradients are summed."""
        if id(module) in self._within and module not in self.scopes:
            return given
        numbers, present = itertools.count(), list[int]()

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            dim = self._dim_of((id(module), "given", next(numbers)), tensor)
            if dim is not None:
                present.append(dim)
            if self._last is None or self._last[0] is not tensor:  # layers that get the same, one after the other
                entered = tensor
                if dim is not None:
                    entered = tensor_exchanges.gathered(tensor, self._group, self._edges(), dim)
                elif tensor.requires_grad:
                    entered = tensor_exchanges.entering(tensor, self._group)
                self._last = tensor, entered
            return self._last[1]

        found = map_tensors(whole, given)
        self._present = present[0] if present else self._present
        return found

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what ranks have found with their features, this rank's positions of it."""
        return tensor_exchanges.scattered(part, self._group, self._edges(), self._present_dim())

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's positions of what all ranks have."""
        return tensor_exchanges.cut(whole, self._group, self._edges(), self._present_dim())

    def _present_dim(self) -> int:
        if self._present is None:
            raise other_way("a layer of a block was given what has no positions")
        return self._present

    def _dim_of(self, key: Key, mine: torch.Tensor) -> int | None:
        """Along which dimension a tensor is cut; None: it is whole.

        That is found by its shape when blocks are divided, and the same ever after.
        """
        if key not in self._dims:
            whole = self._shapes.get(key)
            if whole is None:
                raise other_way("a block calls a layer that it did not call before")
            edges, rank = self._edges(), self._group.rank
            others = [dim for dim, pair in enumerate(zip(whole, mine.shape, strict=False)) if pair[0] != pair[1]]
            sizes = [(whole[dim], mine.shape[dim]) for dim in others]
            if len(whole) != mine.dim() or (others and sizes != [(edges[-1], edges[rank + 1] - edges[rank])]):
                raise other_way(f"{tuple(mine.shape)} is no part of {tuple(whole)}")
            self._dims[key] = others[0] if others else None
        return self._dims[key]

    def settle(self) -> None:
        """What is not known now is another way."""
        self._shapes = {}

    def end(self) -> None:
        """A way back is over."""
        self._lengths.clear()

    def _edges(self) -> list[int]:
        if len(self._lengths) > 1 and torch._C._current_graph_task_id() != -1:
            raise other_way("blocks that are computed anew on the way back were called with sequences of two lengths")
        return bounds(self._length, self._group.world)


def partial_of(regions: Sequence[Region], cuts: Container[int]) -> set[int]:
    """Parameters that are whole on every rank and of whose gradients each rank has a share, by their identity."""
    return {id(p) for region in regions for p in region.parameters if id(p) not in cuts}
