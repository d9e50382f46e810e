"""Where does a generator of the script's own stand while workers fetch ahead?

A shuffled loader that was given a generator draws from it at a pass's first batch, and once more where the order ends.
Workers of ours reach that end while the script is still some batches away from it, or never gets there, and the
script's own reach it at another batch. So the order is drawn from a copy, and the script's generator is moved when
plain would get so far. In: a loader. Out: its `Shuffle`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

KNOWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw all their numbers at the first batch, from the script's generators or from one of their own."""


class Shuffle:
    """One pass of a `RandomSampler` that has the script's own generator."""

    def __init__(self, sampler: RandomSampler, last: int) -> None:
        self._sampler = sampler
        self._generator = sampler.generator
        self._last = last
        """With how many batches in the script's hands the order has ended in plain."""
        self._num_handed = 0
        self._ended = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The order of a pass that begins in the block is drawn from a copy; afterwards it is drawn as plain does."""
        own = self._generator
        copy = torch.Generator(device=own.device)
        copy.set_state(own.get_state())
        self._sampler.generator = copy
        try:
            yield
        finally:
            self._sampler.generator = own
        self._draw()
        if self._last <= 0:
            self.ended()

    def handed(self) -> None:
        """A batch has reached the script."""
        self._num_handed += 1
        if self._num_handed == self._last:
            self.ended()

    def ended(self) -> None:
        """The script has come to the end of the order."""
        if not self._ended:
            self._ended = True
            self._draw()

    def _draw(self) -> None:
        torch.randperm(len(self._sampler.data_source), generator=self._generator)  # type: ignore[arg-type]


def shuffle_of(loader: DataLoader[Any], ahead: int) -> Shuffle | None:
    """The loader's shuffle, where it draws from a generator of the script's own; None where nothing is to be done.

    `ahead`: by how many batches plain is ahead of the script.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(sampler) is not RandomSampler or sampler.generator is None:
        return None
    partial = isinstance(batches, BatchSampler) and not batches.drop_last and sampler.num_samples % batches.batch_size
    num_asked = len(loader._index_sampler) + (not partial)  # type: ignore[arg-type]
    return Shuffle(sampler, num_asked - ahead)


def runs_ahead(loader: DataLoader[Any]) -> bool:
    """Whether workers would take numbers from a generator of the script's own that plain takes later, or not at all."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if getattr(batches, "generator", None) is not None:
        return True
    if getattr(sampler, "generator", None) is None or type(sampler) in (SubsetRandomSampler, WeightedRandomSampler):
        return False  # these two draw the whole order at once
    if type(sampler) is not RandomSampler or (batches is not None and type(batches) is not BatchSampler):
        return True
    return _draws_on_the_way(sampler)


def _draws_on_the_way(sampler: RandomSampler) -> bool:
    """Whether the order is not drawn whole at the beginning of a pass."""
    return sampler.replacement or sampler.num_samples != len(sampler.data_source)  # type: ignore[arg-type]


def why_not_ahead(loader: DataLoader[Any], *, of_list: bool = True) -> str | None:
    """Why a loader's sampler cannot be asked early, in a few words; None where it can.

    `of_list`: whether an order may be that lies in a list, which the script may write to.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not BatchSampler:
        return "the batches are made up by a sampler of the script's"
    if type(sampler) in (list, tuple, range):
        return None if of_list or type(sampler) is not list else "the order is a list, which may change on the way"
    if type(sampler) not in KNOWN:
        return "the order comes from a sampler of the script's"
    if type(sampler) is not RandomSampler or sampler.generator is None:
        return None
    if _draws_on_the_way(sampler):
        return "the order is drawn bit by bit from a generator of the script's"
    return None


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators of the script's own from which a pass draws."""
    batches = loader.batch_sampler
    holders = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def draw_seed(loader: DataLoader[Any]) -> None:
    """Move the random stream as a new iterator of plain's does, which draws a seed for its workers."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


@contextlib.contextmanager
def drawing_elsewhere(loader: DataLoader[Any], seed: int) -> Iterator[None]:
    """Have the loader draw from a generator of ours; its sampler keeps its own."""
    own = loader.generator
    loader.__dict__["generator"] = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        loader.__dict__["generator"] = own
