"""Are the batches that other workers than the script's give those that its own would give, to the end of the run?

Items may come to read what the script changes (its settings, labels, how far training is) or to draw random numbers, in
a pass that no trial has seen. So the first batch of every pass is computed once more (that of the first pass twice, for
random items are others each time), in a process forked for that, so that no random number, cache or counter of the
script's moves. In: a pass and its batches. Out: an error where one is not plain's, before the script has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.items.fused import SetAsideError
from flatout.frameworks.pytorch.input.plain_iterator import Opened
from flatout.frameworks.pytorch.input.worker_processes import OurWorkers
from flatout.frameworks.pytorch.input.worker_settings import keeps_workers
from flatout.frameworks.pytorch.seams.trees import digest

RANDOM = "items of `{}` draw random numbers, and workers draw others than plain does: class statistical"


class Checks:
    """What is known of one loader under workers of ours."""

    def __init__(self, said: dict[str, None], admits_random: bool) -> None:
        self.admits_random = admits_random
        """Whether random items may be others than plain's."""
        self.said = said
        """What is to be said in the end, also of loaders that are no more."""
        self.num_passes = 0
        self.are_random = False
        """Whether items drew random numbers from the beginning: then no batch is plain's, and none is compared."""


def compare_first(known: Checks, opened: Opened, batch: Any) -> None:
    """The first batch of a pass is about to be given.

    Raises:
        SetAsideError: It may not be plain's.
    """
    loader, iterator = opened.loader, opened.iterator
    if type(iterator) is not OurWorkers or loader.num_workers == opened.settings["num_workers"]:
        return  # a batch of one of the script's own workers, or of as many
    if known.are_random or (keeps_workers(loader) and known.num_passes):
        return  # kept ones have everything as it was in their first pass
    known.num_passes += 1
    again = recomputed(loader, iterator._drawn[0], 2 if known.num_passes == 1 else 1)
    if len(set(again)) > 1:
        why = RANDOM.format(type(loader.dataset).__name__)
        if not known.admits_random:
            raise SetAsideError(why)
        known.said[why] = None
        known.are_random = True
    elif digest(batch) != again[0]:
        raise SetAsideError(
            f"in pass {known.num_passes}, the first batch was not what plain computes: items have come "
            "to follow from something that the script changes, or to draw random numbers"
        )


def recomputed(loader: DataLoader[Any], indices: Any, num: int) -> list[str]:
    """Digests of a batch that is computed `num` times more, from everything as it is now, in a process of its own."""
    twin = object.__new__(type(loader))
    again = [indices] * num
    twin.__dict__.update(vars(loader), sampler=again, num_workers=1, prefetch_factor=1, pin_memory=False)
    twin.__dict__.update(persistent_workers=False, timeout=0, generator=torch.Generator(), _iterator=None)
    twin.__dict__["generator"].seed()  # what draws random numbers draws others each time
    if loader.batch_sampler is not None:
        twin.__dict__["batch_sampler"] = again
    iterator = OurWorkers(twin)
    try:
        return [digest(next(iterator)) for _ in again]
    finally:
        iterator._shutdown_workers()
