"""Which indices does a sampler give next? Looked up where they lie, and nobody is asked.

PyTorch's samplers draw a whole order and go through it; until its end the order lies in a list or a range, with an
iterator that says how far it has come. That iterator is found among what the sampler's generators hold, and copied. So
no sampler is run, no generator moves, and nothing is raised before its time. In: the iterator of a loader's batches,
between two of them. Out: the indices that follow, as far as they are drawn.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import SubsetRandomSampler

MOST_HOLDERS = 64
"""Things that are looked into until the order is found."""

_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_ORDERS = (list, tuple, range)


class Order:
    """What one pass has before it.

    >>> import torch
    >>> batches = iter(torch.utils.data.BatchSampler(range(3, 9), 2, drop_last=False))
    >>> next(batches), Order(batches).following(3)
    ([3, 4], [5, 6, 7])
    """

    def __init__(self, batches: Any, sampler: Any = None) -> None:
        self._batches = batches
        self._among: Sequence[Any] | None = None
        """What the order is an order of; None where it consists of indices."""
        if type(sampler) is SubsetRandomSampler and type(sampler.indices) in _ORDERS:
            self._among = sampler.indices

    def following(self, num: int) -> list[int]:
        """At most so many indices that come next; none where that is not known."""
        iterator = found_in(self._batches)
        if iterator is None:
            return []
        found = list(itertools.islice(iterator, num))
        if self._among is not None:
            found = [int(place) if type(place) is torch.Tensor else place for place in found]  # in older versions
            if any(type(place) is not int or not 0 <= place < len(self._among) for place in found):
                return []
            found = [self._among[place] for place in found]
        return found if all(type(index) is int for index in found) else []


def found_in(holder: Any) -> Any:
    """A copy of the first iterator over an order that a generator, or a `zip` in it, holds; else None."""
    waiting, num_seen = [holder], 0
    while waiting and num_seen < MOST_HOLDERS:
        held, num_seen = waiting.pop(0), num_seen + 1
        if type(held) in _ITERATORS:
            copied = _copied(held)
            if copied is not None:
                return copied
        elif type(held) is GeneratorType:
            inner = [held.gi_yieldfrom] if held.gi_yieldfrom is not None else gc.get_referents(held)[::-1]
            waiting += [one for one in inner if type(one) in (GeneratorType, zip, *_ITERATORS)]  # the innermost first
        elif type(held) is zip:
            waiting += [one for operands in gc.get_referents(held) if type(operands) is tuple for one in operands]
    return None


def _copied(iterator: Any) -> Any:
    """The same place in the same order; None at its end, or where the order is of a kind of the script's."""
    make, operands, *place = iterator.__reduce__()
    if make is not iter or len(operands) != 1 or type(operands[0]) not in _ORDERS:
        return None
    again = iter(operands[0])
    if place and place[0] is not None:
        again.__setstate__(place[0])
    return again
