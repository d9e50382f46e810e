"""Are the batches that workers of ours give those that plain would give, to the end of the run?

Items may come to read what the script changes (its settings, labels, how far training is) or to draw random numbers, in
a pass that no trial has seen. So the first batch of every pass is computed once more (that of the first pass twice, for
one may make the next one another), and later ones (the 2nd, 4th, 8th ...) where the script has no workers, whose items
plain computes only when they are asked for; there it is also looked at every batch whether what workers have a copy of
has changed. Computed is in a process forked for that, so that no random number, cache or counter of the script's moves.
In: a pass and its batches. Out: an error where one is not plain's, before the script has it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from flatout.frameworks.pytorch.input.dataset_state import counts, keeps_workers, marks
from flatout.frameworks.pytorch.input.items.fused import SetAsideError
from flatout.frameworks.pytorch.input.opened import Opened
from flatout.frameworks.pytorch.input.shuffles import KNOWN
from flatout.frameworks.pytorch.input.worker_processes import OurWorkers
from flatout.frameworks.pytorch.input.worker_settings import start_method
from flatout.frameworks.pytorch.seams.trees import digest
from flatout.guest.interruptions import let_through

SHARE = 0.02
"""Of the time since the first pass, how much computing later batches than a pass's first once more may take, and how
much looking closely."""

RANDOM = "items of `{}` draw random numbers, and workers draw others than plain does: class statistical"

COUNTED = "items of `{}` change numbers that it keeps, which each worker has by itself: class statistical"

TOLD_LATE = "a sampler was changed in mid-pass: other workers than the script's had asked it for more, or less, by then"


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
        self.looked_s = 0.0
        """Looking closely."""


class Check:
    """One pass."""

    def __init__(self, known: Checks, opened: Opened) -> None:
        self._known = known
        self._opened = opened
        self._begun: dict[int, Recomputed] = {}
        """Batches that are being computed once more, by their position."""
        self._marks: list[Any] | None = None
        self._close_marks: list[Any] | None = None
        if opened.loader.num_workers and self._is_compared and opened.bare._drawn and self._is_due(0):
            try:  # now: plain's workers would have everything as it is now
                self._begin(0)
                if not known.num_passes and opened.loader.num_workers > 1 and len(opened.bare._drawn) > 1:
                    self._begin(1)  # the first of the second worker
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
        if self._has_changed():
            if not loader.num_workers:
                num_late = len(self._opened.bare._drawn) - position
                raise SetAsideError(
                    "what items or their order follow from was changed while a pass was under way"
                    + (f"; the order of the next {num_late} batches was drawn before" if num_late > 1 else "")
                )
            self._known.said[TOLD_LATE] = None  # begun now, the script's own would see more than they did
        if not self._is_due(position):
            return
        begun_s = perf_counter()
        recomputed = self._begun.pop(position, None) or self._begin(position)
        self._known.num_passes += not position
        is_first = self._known.num_passes == 1 and not position
        differs, why = recomputed.differs(batch, twice=is_first)
        if not why and differs and is_first and self._begin(position).differs(recomputed.batch)[0]:
            why = RANDOM
        self._begun.pop(position, None)
        if why and not self._known.admits_random:
            raise SetAsideError(why.format(type(loader.dataset).__name__))
        if why:
            self._known.said[why.format(type(loader.dataset).__name__)] = None
        if why == RANDOM:
            self._begun.clear()
            self._known.are_random = True
        elif differs:
            raise SetAsideError(
                f"in pass {self._known.num_passes}, batch {position + 1} was not what plain computes: items have come "
                "to follow from something that the script changes, or to draw random numbers"
            )
        if position:
            self._known.took_s += perf_counter() - begun_s

    def _has_changed(self) -> bool:
        """Whether the order's sampler, or what the script's own code makes items of, is not as the pass found it.

        A close look is as long as all that items are made of; it comes as often as its time allows, so that what it
        finds may be some batches old.
        """
        known, begun_s = self._known, perf_counter()
        found = self._looked_at(closely=False)
        self._marks = self._marks or found
        if found != self._marks:
            return True
        if known.looked_s > SHARE * (begun_s - known.begun_s):
            return False
        found = self._looked_at(closely=True)
        self._close_marks = self._close_marks or found
        known.looked_s += perf_counter() - begun_s
        return found != self._close_marks

    def _looked_at(self, *, closely: bool) -> list[Any]:
        loader = self._opened.loader
        order = [one for one in (loader.sampler, loader.batch_sampler) if type(one) not in (*KNOWN, BatchSampler)]
        found = marks(*order, closely=closely, but=loader.dataset)
        return found if loader.num_workers else found + marks(loader.dataset, loader.collate_fn, closely=closely)

    def _is_due(self, position: int) -> bool:
        known, loader = self._known, self._opened.loader
        if known.are_random:
            return False
        if not position:
            return not (keeps_workers(loader) and known.num_passes)  # kept ones have everything as it was then
        if loader.num_workers:
            return position in self._begun
        if (position + 1) & position:
            return False
        return known.num_passes == 1 or known.took_s <= SHARE * (perf_counter() - known.begun_s)

    def _begin(self, position: int) -> Recomputed:
        self._begun[position] = Recomputed(self._opened.loader, self._opened.bare._drawn[position])
        return self._begun[position]


class Recomputed:
    """A batch computed once more, from everything as it is now, in a process of its own."""

    def __init__(self, loader: DataLoader[Any], indices: Any) -> None:
        self.batch: Any = None
        twin = object.__new__(type(loader))
        again = [indices, indices]
        twin.__dict__.update(vars(loader), sampler=again, num_workers=1, prefetch_factor=1, pin_memory=False)
        twin.__dict__.update(persistent_workers=False, timeout=0, generator=torch.Generator(), _iterator=None)
        twin.__dict__["generator"].seed()  # what draws random numbers draws others each time
        if loader.batch_sampler is not None:
            twin.__dict__["batch_sampler"] = again
        if not loader.num_workers:
            twin.__dict__["worker_init_fn"] = None
            if start_method() != "fork":  # others would have the script's modules as they are imported
                twin.multiprocessing_context = "fork"
        if not loader.num_workers or start_method() == "fork":
            twin.__dict__["collate_fn"] = Counting(loader.collate_fn, loader.dataset)
        self._iterator = OurWorkers(twin, asked_once=False)

    def differs(self, batch: Any, *, twice: bool = False) -> tuple[bool, str]:
        """Whether a batch is another; and, computed `twice`, why what one computes makes the next one another."""
        try:
            self.batch = _batch_of(next(self._iterator))
            found = digest(self.batch)
            if not twice:
                return found != digest(batch), ""
            again = next(self._iterator)
            has_counted = isinstance(again, Counted) and again.has_counted
            why = RANDOM if digest(_batch_of(again)) != found else COUNTED if has_counted else ""
            return found != digest(batch), why
        finally:
            self._iterator._shutdown_workers()


class Counted(NamedTuple):
    """What `Counting` gives: a batch, and whether its items have changed a number since the batch before."""

    has_counted: bool
    batch: Any


class Counting:
    """A collate function that tells whether computing items has changed what the dataset counts."""

    def __init__(self, collate: Any, dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset
        self._before: dict[Any, Any] | None = None

    def __call__(self, items: Any) -> Any:
        """The batch, in the end."""
        batch = self._collate(items)
        before, self._before = self._before, counts(self._dataset)
        has_counted = before is not None and any(self._before.get(at, n) != n for at, n in before.items())
        return Counted(has_counted, batch)


def _batch_of(computed: Any) -> Any:
    return computed.batch if isinstance(computed, Counted) else computed
