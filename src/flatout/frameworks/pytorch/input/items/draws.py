"""Random numbers for many items at once: those that as many single calls would have drawn, in the same order.

`torch.randint(0, n, (1,))` and `torch.rand(1)` each take one word of 32 bits from PyTorch's stream. All words of a
batch are taken in one call. That PyTorch draws so shows in the first batches, which are computed both ways. In: what
one item draws. Out: arrays with a number for each item.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items.rows import Unvectorised

UNIFORM = 0
"""Stands for `torch.rand(1)`; any other number n for `torch.randint(0, n, (1,))`."""

MOST_BELOW = 2**27
"""Larger integers take two words."""


def drawn(kinds: Sequence[int], num_items: int) -> list[np.ndarray]:
    """One array for each number that an item draws, `int64` or, for `UNIFORM`, `float32`."""
    if torch.get_default_dtype() is not torch.float32:
        raise Unvectorised("random numbers of another type than `float32`")
    words = _words(len(kinds) * num_items).reshape(num_items, len(kinds))
    return [_number(words[:, place], kind) for place, kind in enumerate(kinds)]


def skip(num_words: int) -> None:
    """Move PyTorch's stream by so many words."""
    _words(num_words)


def _number(words: np.ndarray, kind: int) -> np.ndarray:
    if kind == UNIFORM:
        return (words & (2**24 - 1)).astype(np.float32) * np.float32(2**-24)
    return words % kind


def _words(num: int) -> np.ndarray:
    """The next words of PyTorch's stream, as `int64`."""
    pairs = torch.empty((num + 1) // 2, dtype=torch.int64)
    if num % 2 == 0:
        pairs.random_(-(2**63), None)
    else:  # two calls of an even number each, from the same place but for one word, so that no word too many is taken
        before = torch.get_rng_state()
        pairs.random_(-(2**63), None)
        torch.set_rng_state(before)
        torch.rand(1, dtype=torch.float32)
        torch.empty(num // 2, dtype=torch.int64).random_(-(2**63), None)
    found = pairs.numpy()
    return np.stack([(found >> 32) & 0xFFFFFFFF, found & 0xFFFFFFFF], axis=1).reshape(-1)[:num]
