"""How does a script without workers get its batches early, and exactly? Speculation with a check.

The first batches of a pass are fetched as plain fetches them, while it is measured how far a batch moves the random
generators, and the training between two. Then processes are forked that make the following batches, each standing where
the script will stand if it goes on like this. A batch is taken only where the script's generators stand exactly where
that process began it, and then they are moved to where it ended; so items, their order and every later random number
are plain's, to the bit. Else what was made is thrown away, the batch is fetched plainly, and it begins again.

In: the script's own iterator over a loader. Out: its batches.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from flatout.frameworks.pytorch.input.ahead.acts import opened_now
from flatout.frameworks.pytorch.input.ahead.generators import Draws, Movements, Place
from flatout.frameworks.pytorch.input.ahead.process import Items, Made, Wanted
from flatout.frameworks.pytorch.input.plain_iterator import GivenOrder
from flatout.frameworks.pytorch.input.reach import UnknownError
from flatout.frameworks.pytorch.input.shuffles import KNOWN, generators_of
from flatout.frameworks.pytorch.input.watch import Watch
from flatout.frameworks.pytorch.input.worker_processes import OurWorkers
from flatout.frameworks.pytorch.input.worker_settings import start_method
from flatout.frameworks.pytorch.seams.trees import digest, tensors_of
from flatout.guest.interruptions import is_interruption

MOST_MISSES = 4
"""After so many in a row it is not tried again."""

MOST_MEASURED = 6
"""Batches of a pass that are fetched plainly while nothing can be predicted."""

READY = 2
"""Batches that each process has ready."""

LEAST_PATIENCE_S, PATIENCE = 10.0, 20
"""How long a batch is waited for: these seconds, and so many times what one of the slowest that were fetched took."""


class AheadOf:
    """What is known of one loader."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.movements = Movements()
        self.watch: Watch | None = None
        """What its items reach, as it was when processes began."""
        self.num_misses = self.num_made = 0
        self.why_not = ""
        """Why it is not tried any more; empty where it is."""

    def missed(self, why: str) -> None:
        """What was made ahead was of no use."""
        self.num_misses += 1
        if self.num_misses >= MOST_MISSES:
            self.give_up(why)

    def give_up(self, why: str) -> None:
        """Plain from now on."""
        self.why_not = self.why_not or why
        self._owner.said[f"batches are left to plain instead of made ahead: {self.why_not}"] = None

    def taken(self) -> None:
        """A batch that was made ahead is the script's, or the same as plain's."""
        self._owner.num_ahead += 1
        self.num_made += 1
        self.num_misses = 0


def refusal(loader: DataLoader[Any]) -> str | None:
    """Why no process may make this loader's batches; None where they may."""
    if loader.num_workers:
        return "the script has workers"
    if isinstance(loader.dataset, IterableDataset):
        return "an iterable dataset gives its items one after another"
    if generators_of(loader):
        return "it draws from a generator of the script's, which would be moved early"
    order = (loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler)
    if any(type(one) not in (*KNOWN, BatchSampler, range, type(None)) for one in order):
        return "its order comes from a sampler of the script's, which would be asked early"
    if start_method() != "fork":
        return f"processes are started by `{start_method()}`, which would not inherit the dataset as it is"
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not getattr(handler, "__module__", "").startswith("torch."):
        return "the script handles SIGCHLD, and would hear of processes that are not its own"
    if np.random.mtrand._rand._bit_generator.__class__ is not np.random.MT19937:
        return "NumPy's own generator is of another kind than MT19937"
    try:
        Watch(loader.dataset, loader.collate_fn)
    except UnknownError as problem:
        return f"nobody can say whether its items change something: {problem}"
    return None


class Ahead:
    """The iterator that the script gets.

    Args:
        loader: Whose batches.
        plain: The script's own iterator over it.
        num: How many processes.
        known: What is known of the loader.
    """

    def __init__(self, loader: DataLoader[Any], plain: Any, num: int, known: AheadOf) -> None:
        self._loader, self.plain, self._num, self._known = loader, plain, num, known
        self._workers: OurWorkers | None = None
        self._num_given = self._num_measured = 0
        self._slowest_s = 0.0
        self._draws_order = True
        """Whether the sampler draws with the next batch, so that what that draws is not a batch's alone."""

    def __iter__(self) -> Ahead:
        return self

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # while being copied
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __next__(self) -> Any:
        if self._workers is None:
            return self._measured()
        workers, known = self._workers, self._known
        is_due = known.num_made & (known.num_made + 1) == 0  # the 1st, 2nd, 4th, 8th ... of all
        if is_due and self._num_given < len(workers._drawn):
            return self._compared(workers)
        made = self._next_made(workers)
        if made is None:
            return self._measured()
        if not self._is_plains(made, self._here()):
            self._back()
            return self._measured()
        if made.after is not None:
            assert self._known.watch is not None
            made.after.put(self._known.watch.generators)
        self._num_given += 1
        known.taken()
        self.plain._num_yielded += 1
        _out_of_shared_memory(made.batch)
        return made.batch

    def _next_made(self, workers: OurWorkers) -> Made | None:
        """The next batch; None where it is to be fetched here, for whatever reason: that raises as plain does."""
        try:
            made: Made = next(workers)
            return made
        except Exception as problem:
            if isinstance(problem, StopIteration) and self._num_given == len(workers._drawn):  # not one of an item's
                self._workers = None
                raise
            if is_interruption(problem):
                raise
            what = "died or hung" if workers._broken else "failed"
            why = f"a process that makes batches {what}: {type(problem).__name__}: {problem}"
            (self._known.give_up if workers._broken else self._known.missed)(why)
            self._back()
            return None

    def _is_plains(self, made: Made, before: Place) -> bool:
        """Whether it was made of the dataset as it is, and from where the generators stand."""
        known = self._known
        assert self._workers is not None
        if self._is_changed():
            return False
        if made.problem:
            known.give_up(f"its code {made.problem}, which a process apart may not")
        elif made.before is not None and made.before != before:
            known.movements.batches_differ |= self._workers._num_workers > 1
            known.missed("not as many random numbers are drawn from step to step")
        else:
            return True
        return False

    def _is_changed(self, *, by_items: bool = False) -> bool:
        """Whether something that items reach is not as it was when the processes began."""
        assert self._known.watch is not None
        name = self._known.watch.changed()
        if name is not None and by_items:
            self._known.give_up(f"its code changes `{name}`, which a process apart may not")
        elif name is not None:
            self._known.missed(f"the script changes `{name}` while a pass is under way")
        return name is not None

    def _compared(self, workers: OurWorkers) -> Any:
        """The batch as plain computes it, while it is made ahead as well: both must be the same."""
        if self._is_changed():
            self._back()
            return self._measured()
        before = self._here()
        self._num_given += 1
        try:
            batch = self._plainly(workers._drawn[self._num_given - 1].index)
        except BaseException:
            self._back()
            raise
        if self._is_changed(by_items=True):
            self._back()
            return batch
        made = self._next_made(workers)
        if made is None:
            return batch
        if not self._is_plains(made, before):
            self._back()
            return batch
        after = self._here()
        if (made.after or before) != after or digest(batch) != digest(made.batch):
            self._known.give_up("its items are others in a process apart")
            self._back()
        else:
            self._known.taken()
        return batch

    def _plainly(self, index: Any) -> Any:
        rest = self.plain._sampler_iter
        self.plain._sampler_iter = iter([index])
        try:
            return next(self.plain)
        finally:
            self.plain._sampler_iter = rest

    def _here(self) -> Place:
        return Place.now(self._known.watch.generators if self._known.watch is not None else ())

    # -- plain, measured -----------------------------------------------------------------------------------------

    def _measured(self) -> Any:
        """A batch as plain fetches it; the next ones may be made ahead."""
        known = self._known
        if known.why_not or self._num_measured >= MOST_MEASURED:
            return next(self.plain)
        if known.watch is None and not self._is_watched():
            return next(self.plain)
        before = None if self._draws_order else self._here()
        begun_s = time.perf_counter()
        batch = next(self.plain)
        self._slowest_s = max(self._slowest_s, time.perf_counter() - begun_s)
        self._draws_order = False
        self._num_measured += 1
        known.movements.saw(before, self._here())
        if known.movements.draws_nothing or known.movements.gap is not None:
            self._begin()
        return batch

    # -- processes -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Fork processes that make the batches after this one."""
        movements, loader = self._known.movements, self._loader
        gap = Draws() if movements.draws_nothing else movements.gap
        assert gap is not None
        if (self._known.watch is None or self._known.watch.changed() is not None) and not self._is_watched():
            return
        watch = self._known.watch
        assert watch is not None
        num = self._num if movements.batch is not None else 1  # nobody can stand behind a batch of unknown draws
        script = opened_now(), torch.get_num_threads()
        items = Items(watch, self._here(), movements.batch, gap, script)
        order = (Wanted(number, index) for number, index in enumerate(self.plain._sampler_iter))
        twin = object.__new__(type(loader))
        attributes = twin.__dict__
        attributes.update(vars(loader), dataset=items, collate_fn=items.collate, num_workers=num)
        attributes.update(prefetch_factor=READY, persistent_workers=False, worker_init_fn=None)
        attributes.update(timeout=LEAST_PATIENCE_S + PATIENCE * num * self._slowest_s)
        attributes.update(generator=torch.Generator().manual_seed(0), _iterator=None)
        given: Any = GivenOrder(loader._index_sampler, order)
        attributes["batch_sampler" if loader.batch_sampler is not None else "sampler"] = given
        try:
            self._workers = OurWorkers(twin)
        except (OSError, RuntimeError) as problem:
            self._known.give_up(f"no process could be started: {problem}")
        self._num_given = 0

    def _is_watched(self) -> bool:
        """Look at what its items reach as it is now; whether that is possible."""
        try:
            self._known.watch = Watch(self._loader.dataset, self._loader.collate_fn)
        except UnknownError as problem:
            self._known.give_up(str(problem))
        return self._known.watch is not None

    def _back(self) -> None:
        """Throw away what was made, and have plain go on where the script is."""
        workers, self._workers = self._workers, None
        assert workers is not None
        rest = itertools.islice(workers.order(), self._num_given, None)
        workers._shutdown_workers()
        self.plain._sampler_iter = _indices(rest)
        self._num_measured = 0
        self._known.movements.forget()


def _indices(order: Iterator[Wanted]) -> Iterator[Any]:
    for wanted in order:
        yield wanted.index


def _out_of_shared_memory(batch: Any) -> None:
    """Have tensors lie in memory of this process: of what is shared each piece takes a file descriptor while kept."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(batch):
        if tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_shared():
            memory = tensor.untyped_storage()
            own = copies.get(memory.data_ptr())
            if own is None:
                own = copies[memory.data_ptr()] = memory.clone()
            place = (tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(own, *place)
