"""From which random streams does a pass draw its order, and may it be drawn early? In: a loader. Out: generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

KNOWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw all their numbers at the first batch, from the script's generators or from one of their own."""


def why_not_ahead(loader: DataLoader[Any], *, of_list: bool = True) -> str | None:
    """Why a loader's sampler cannot be asked early, in a few words; None where it can.

    `of_list`: whether an order may be that lies in a list, which the script may write to.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return "the script puts its batches together itself"
    if type(batches) is not BatchSampler:
        return "the batches are made up by a sampler of the script's"
    if type(sampler) in (list, tuple, range):
        return None if of_list or type(sampler) is not list else "the order is a list, which may change on the way"
    if type(sampler) not in KNOWN:
        return "the order comes from a sampler of the script's"
    if type(sampler) is not RandomSampler or sampler.generator is None:
        return None
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):  # type: ignore[arg-type]
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
