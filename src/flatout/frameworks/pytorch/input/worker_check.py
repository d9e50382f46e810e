"""Are the batches that workers of ours give those that plain would give, to the end of the run?

Items may come to read what the script changes (its settings, labels, how far training is) or to draw random numbers, in
a pass that no trial has seen. So the first batch of every pass is computed once more (that of the first pass twice, for
random items are others each time), and later ones (the 2nd, 4th, 8th ...) where the script has no workers, whose items
plain computes only when they are asked for; there it is also looked at every batch whether what workers have a copy of
has changed. Computed is in a process forked for that, so that no random number, cache or counter of the script's moves.
In: a pass and its batches. Out: an error where one is not plain's, before the script has it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from flatout.frameworks.pytorch.input.dataset_state import keeps_workers, marks
from flatout.frameworks.pytorch.input.items.fused import SetAsideError
from flatout.frameworks.pytorch.input.plain_iterator import Opened
from flatout.frameworks.pytorch.input.shuffles import KNOWN
from flatout.frameworks.pytorch.input.worker_processes import OurWorkers
from flatout.frameworks.pytorch.input.worker_settings import start_method
from flatout.frameworks.pytorch.seams.trees import digest

SHARE = 0.02
"""Of the time since the first pass, how much computing later batches than a pass's first once more may take."""

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
        self.begun_s = perf_counter()
        self.took_s = 0.0
        """Computing later batches once more."""


class Check:
    """One pass."""

    def __init__(self, known: Checks, opened: Opened) -> None:
        self._known = known
        self._opened = opened
        self._marks: list[Any] | None = None

    def compare(self, batch: Any, position: int) -> None:
        """The batch at a position of the pass, counted from 0, is about to be given.

        Raises:
            SetAsideError: It may not be plain's.
        """
        known, loader, bare = self._known, self._opened.loader, self._opened.bare
        if type(bare) is not OurWorkers or loader.num_workers == self._opened.settings["num_workers"]:
            return  # a batch of one of the script's own workers, or of as many
        if not loader.num_workers:
            order = [one for one in (loader.sampler, loader.batch_sampler) if type(one) not in (*KNOWN, BatchSampler)]
            found = marks(*order, closely=False, but=loader.dataset)
            found += marks(loader.dataset, loader.collate_fn, closely=False)
            self._marks = self._marks or found
            if found != self._marks:
                num_late = len(bare._drawn) - position
                raise SetAsideError(
                    "what items or their order follow from was changed while a pass was under way"
                    + (f"; the order of the next {num_late} batches was drawn before" if num_late > 1 else "")
                )
        if not self._is_due(position):
            return
        begun_s = perf_counter()
        known.num_passes += not position
        is_first = known.num_passes == 1 and not position
        again = recomputed(loader, bare._drawn[position], 2 if is_first else 1)
        if len(set(again)) > 1:
            why = RANDOM.format(type(loader.dataset).__name__)
            if not known.admits_random:
                raise SetAsideError(why)
            known.said[why] = None
            known.are_random = True
        elif digest(batch) != again[0]:
            raise SetAsideError(
                f"in pass {known.num_passes}, batch {position + 1} was not what plain computes: items have come "
                "to follow from something that the script changes, or to draw random numbers"
            )
        if position:
            known.took_s += perf_counter() - begun_s

    def _is_due(self, position: int) -> bool:
        known, loader = self._known, self._opened.loader
        if known.are_random:
            return False
        if not position:
            return not (keeps_workers(loader) and known.num_passes)  # kept ones have everything as it was then
        if loader.num_workers or (position + 1) & position:
            return False
        return known.num_passes == 1 or known.took_s <= SHARE * (perf_counter() - known.begun_s)


def recomputed(loader: DataLoader[Any], indices: Any, num: int) -> list[str]:
    """Digests of a batch that is computed `num` times more, from everything as it is now, in a process of its own."""
    twin = object.__new__(type(loader))
    again = [indices] * num
    twin.__dict__.update(vars(loader), sampler=again, num_workers=1, prefetch_factor=1, pin_memory=False)
    twin.__dict__.update(persistent_workers=False, timeout=0, generator=torch.Generator(), _iterator=None)
    twin.__dict__["generator"].seed()  # what draws random numbers draws others each time
    if loader.batch_sampler is not None:
        twin.__dict__["batch_sampler"] = again
    if not loader.num_workers:
        twin.__dict__["worker_init_fn"] = None
        if start_method() != "fork":  # others would have the script's modules as they are imported
            twin.multiprocessing_context = "fork"
    iterator = OurWorkers(twin, asked_once=False)
    try:
        return [digest(next(iterator)) for _ in again]
    finally:
        iterator._shutdown_workers()
