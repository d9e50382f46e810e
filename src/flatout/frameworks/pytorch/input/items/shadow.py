"""Is a batch bit for bit what the script's own path gives? The first batches whole, then an item now and then.

In: a computed batch, and the dataset. Out: why they differ, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NUM_FIRST = 2
"""Batches that are computed both ways."""

EVERY = 1000
"""Items of which one is computed both ways, after that."""

AT_ONCE = 8
"""Items that are computed both ways one after another: code that ran just now runs several times as fast."""


class Shadow:
    """Recomputes what the script would have computed."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_items = 0
        self._since = 0

    @property
    def first(self) -> bool:
        """Whether the next batch is to be computed both ways."""
        return self.num_batches < NUM_FIRST

    def of_batch(self, batch: Any, plain: Any) -> str | None:
        """A whole batch, computed both ways."""
        self.num_batches += 1
        return difference(batch, plain)

    def any_due(self, num: int) -> bool:
        """Whether items of the next batch, which has so many, are to be computed both ways."""
        self._since += num
        return self._since >= EVERY * AT_ONCE

    def of_items(self, batch: Any, indices: list[int], plain: Callable[[int], Any]) -> str | None:
        """The items that are due in this batch, of which `any_due` says that there are some.

        Args:
            batch: What was computed.
            indices: Of its items.
            plain: Gives the batch of the item at one place, by the script's own path.
        """
        num = min(self._since // EVERY, len(indices))
        self._since -= num * EVERY  # of a small batch the rest is due in the next ones
        first = self.num_items * 7919  # every place in its turn, drawn from no generator
        self.num_items += num
        for place in sorted({(first + number * 7919) % len(indices) for number in range(num)}):
            if why := difference(rows(batch, [place]), plain(place)):
                return f"item {indices[place]}: {why}"
        return None


def difference(one: Any, other: Any) -> str | None:
    """What differs between two batches, in a few words."""
    kind = type(one)
    if kind is not type(other):
        return f"a `{kind.__name__}` where plain has a `{type(other).__name__}`"
    if issubclass(kind, torch.Tensor):
        if kind is not torch.Tensor:
            one, other = one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
        if one.is_quantized or other.is_quantized:  # to look at its bytes as another type ends the process
            return "a quantised tensor, which is not compared"
        if _form(one) != _form(other):
            return f"a tensor {_described(one)} where plain has {_described(other)}"
        return None if torch.equal(_bits(one), _bits(other)) else "other values"
    if kind in (list, tuple):
        parts = list(zip(one, other, strict=False)) if len(one) == len(other) else [(len(one), str(len(other)))]
    elif kind is dict:
        parts = [(one[key], other[key]) for key in one] if list(one) == list(other) else [(list(one), "other keys")]
    else:
        return None if one == other else "other values"
    return next((why for a, b in parts if (why := difference(a, b))), None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    aligned = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if aligned else torch.uint8)  # eight bytes at a time, where they are


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        *(tensor.dtype, tensor.shape, tensor.stride(), tensor.device),
        *(tensor._is_view(), tensor.requires_grad),
    )


def _described(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {list(tensor.stride())} {tensor.device}"
    return text + " view" * tensor._is_view() + " with history" * tensor.requires_grad


def rows(batch: Any, places: list[int]) -> Any:
    """The batch that the items at these places would be."""
    kind = type(batch)
    if kind is torch.Tensor:
        return batch.index_select(0, torch.tensor(places))
    if kind is dict:
        return {key: rows(part, places) for key, part in batch.items()}
    if kind in (list, tuple) and batch and type(batch[0]) is str:
        return kind(batch[place] for place in places)
    return kind(rows(part, places) for part in batch)
