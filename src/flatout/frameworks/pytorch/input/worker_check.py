"""Are the batches that workers of ours give those that plain would give, to the end of the run?

Items may come to read what the script changes (its settings, labels, how far training is) or to draw random numbers, in
a pass that no trial has seen. So the first batch of every pass is computed once more, and later ones (the 2nd, 4th, 8th
...) where the script has no workers, whose items plain computes only when they are asked for; there it is also looked
at every batch whether what workers have a copy of has changed. Computed is in a process forked for that, so that no
random number, cache or counter of the script's moves. In: a pass and its batches. Out: an error where one is not
plain's, before the script has it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from flatout.frameworks.pytorch.input.dataset_state import keeps_workers, marks
from flatout.frameworks.pytorch.input.items.fused import SetAsideError
from flatout.frameworks.pytorch.input.opened import Opened
from flatout.frameworks.pytorch.input.shuffles import KNOWN
from flatout.frameworks.pytorch.input.worker_processes import OurWorkers
from flatout.frameworks.pytorch.input.worker_settings import start_method
from flatout.frameworks.pytorch.seams.trees import digest
from flatout.guest.interruptions import let_through

SHARE = 0.02
"""Of the time since the first pass, how much later batches than a pass's first may take to compute once more."""

RANDOM = "items of `{}` draw random numbers, and workers draw others than plain does: class statistical"

TOLD_LATE = "a sampler was changed in mid-pass: other workers than the script's had asked it for more, or less, by then"


class Checks:
    """What is known of one loader under workers of ours."""

    def __init__(self, said: dict[str, None]) -> None:
        self.said = said
        """What is to be said in the end, also of loaders that are no more."""
        self.num_passes = 0
        self.are_random = False
        """Whether items drew random numbers from the beginning: then no batch is plain's, and none is compared."""
        self.begun_s = perf_counter()
        self.took_s = 0.0


class Check:
    """One pass."""

    def __init__(self, known: Checks, opened: Opened) -> None:
        self._known = known
        self._opened = opened
        self._recomputed: Recomputed | None = None
        self._marks: list[Any] | None = None
        if opened.loader.num_workers and self._is_compared and opened.bare._drawn and self._is_due(0):
            try:  # now: plain's workers would have everything as it is now
                self._begin(0)
            except Exception as problem:  # noqa: BLE001  tried again when the batch is there, which is the time to fail
                let_through(problem)

    @property
    def _is_compared(self) -> bool:
        """Whether workers of ours give the batches, and not each of them is one of the script's."""
        opened = self._opened
        return type(opened.bare) is OurWorkers and opened.loader.num_workers != opened.settings["num_workers"]

    def compare(self, batch: Any, position: int) -> None:
        """The batch at a position of the pass, counted from 0, is about to be given.

        Raises:
            SetAsideError: It may not be plain's.
        """
        if not self._is_compared:
            return
        loader = self._opened.loader
        order = [one for one in (loader.sampler, loader.batch_sampler) if type(one) not in (*KNOWN, BatchSampler)]
        found = marks(*order, data=False, but=loader.dataset)
        if not loader.num_workers:
            found += marks(loader.dataset, loader.collate_fn, data=False)
        if self._marks is None:
            self._marks = found
        if found != self._marks and loader.num_workers:  # begun now, the script's own would see more than they did
            self._known.said[TOLD_LATE] = None
        elif found != self._marks:
            raise SetAsideError("what items or their order follow from was changed while a pass was under way")
        if not self._is_due(position):
            return
        begun_s = perf_counter()
        recomputed = self._recomputed or self._begin(position)
        self._recomputed = None
        differs = recomputed.differs(batch)
        self._known.num_passes += not position
        if differs and self._known.num_passes == 1 and not position and self._begin(position).differs(recomputed.batch):
            self._known.are_random = True
            self._known.said[RANDOM.format(type(loader.dataset).__name__)] = None
        elif differs:
            raise SetAsideError(
                f"in pass {self._known.num_passes}, batch {position + 1} was not what plain computes: items have come "
                "to follow from something that the script changes, or to draw random numbers"
            )
        if position:
            self._known.took_s += perf_counter() - begun_s

    def _is_due(self, position: int) -> bool:
        known, loader = self._known, self._opened.loader
        if known.are_random:
            return False
        if not position:
            return not (keeps_workers(loader) and known.num_passes)  # kept ones have everything as it was then
        if loader.num_workers or (position + 1) & position:
            return False
        return known.num_passes == 1 or known.took_s <= SHARE * (perf_counter() - known.begun_s)

    def _begin(self, position: int) -> Recomputed:
        self._recomputed = Recomputed(self._opened.loader, self._opened.bare._drawn[position])
        return self._recomputed


class Recomputed:
    """A batch computed once more, from everything as it is now, in a process of its own."""

    def __init__(self, loader: DataLoader[Any], indices: Any) -> None:
        self.batch: Any = None
        twin = object.__new__(type(loader))
        twin.__dict__.update(vars(loader), sampler=[indices], num_workers=1, prefetch_factor=1, pin_memory=False)
        twin.__dict__.update(persistent_workers=False, timeout=0, generator=torch.Generator(), _iterator=None)
        twin.__dict__["generator"].seed()  # what draws random numbers draws others each time
        if loader.batch_sampler is not None:
            twin.__dict__["batch_sampler"] = [indices]
        if not loader.num_workers:
            twin.__dict__["worker_init_fn"] = None
            if start_method() != "fork":  # others would have the script's modules as they are imported
                twin.multiprocessing_context = "fork"
        self._iterator = OurWorkers(twin, asked_once=False)

    def differs(self, batch: Any) -> bool:
        """Whether a batch is another."""
        try:
            self.batch = next(self._iterator)
        finally:
            self._iterator._shutdown_workers()
        return digest(self.batch) != digest(batch)
