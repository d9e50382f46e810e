"""How do items whose tensors are not computed yet become a batch? Each tensor is computed straight into its place.

PyTorch's `default_collate` puts the batch together; only what it makes of tensors that have their places already is
known beforehand. In: items, one after another. Out: the batch that `default_collate` gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from flatout.frameworks.pytorch.input.items.rows import stacks_densely
from flatout.frameworks.pytorch.input.pixels.tensors import DeferredTensor


class Collation:
    """One batch of `num` items."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._wholes: list[torch.Tensor] = []
        self._places: dict[int, tuple[int, int]] = {}
        """For each tensor, by identity: which part of the batch it is in, and at which place."""
        self._used: set[int] = set()

    def place(self, tensors: list[DeferredTensor], number: int) -> None:
        """Give the tensors of an item their places."""
        for part, tensor in enumerate(tensors):
            layout = tensor.flatout_layout
            if number == 0 and part == len(self._wholes) and stacks_densely(layout.shape, layout.strides, layout.dtype):
                self._wholes.append(torch.empty((self._num, *layout.shape), dtype=layout.dtype, device="cpu"))
            if part >= len(self._wholes):
                return
            whole = self._wholes[part]
            if tuple(whole.shape[1:]) == layout.shape and whole.dtype is layout.dtype:
                tensor.flatout_place(whole[number])
                self._places[id(tensor)] = part, number

    def batch(self, items: list[Any]) -> Any:
        """The batch, as soon as the numbers are computed.

        Raises:
            Exception: Whatever `default_collate` raises.
        """
        return collate(items, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._collated})

    def _collated(self, tensors: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        part = self._part(tensors)
        if part is not None and part not in self._used:
            self._used.add(part)
            return self._wholes[part]
        computed = [tensor.flatout_value() if isinstance(tensor, DeferredTensor) else tensor for tensor in tensors]
        return collate_tensor_fn(computed, collate_fn_map=collate_fn_map)

    def _part(self, tensors: Any) -> int | None:
        """The part of the batch that consists of just these tensors in this order."""
        places = [self._places.get(id(tensor)) for tensor in tensors]
        first = places[0]
        if first is None or places != [(first[0], number) for number in range(self._num)]:
            return None
        return first[0]


def is_plain() -> bool:
    """Whether `default_collate` treats tensors as PyTorch has it, and not by a function of the script's."""
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
