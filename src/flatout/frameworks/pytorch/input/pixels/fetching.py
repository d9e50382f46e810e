"""Batches whose pixel work is done by several threads.

A `PixelFetcher` stands in a loader's own iterator in the place of PyTorch's fetcher. It runs the script's code for each
item in the thread that asks for the batch, so that random numbers are drawn in the script's order, and has the pixel
work that this leaves behind done by threads, from the first item on. What goes wrong is fetched again by the fetcher
that was there. In: indices. Out: the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from flatout.frameworks.pytorch.input.items.flushing import flushes_to_zero
from flatout.frameworks.pytorch.input.items.fused import SetAsideError
from flatout.frameworks.pytorch.input.items.shadow import difference, row
from flatout.frameworks.pytorch.input.items.unheard import unheard
from flatout.frameworks.pytorch.input.pixels import collation
from flatout.frameworks.pytorch.input.pixels.collation import Collation
from flatout.frameworks.pytorch.input.pixels.comparison import item_difference
from flatout.frameworks.pytorch.input.pixels.decoded import DecodedImages
from flatout.frameworks.pytorch.input.pixels.decoding import Rows
from flatout.frameworks.pytorch.input.pixels.seams import Seams
from flatout.frameworks.pytorch.input.pixels.sources import Descriptors
from flatout.frameworks.pytorch.input.pixels.surroundings import File, Surroundings, settings_now
from flatout.frameworks.pytorch.input.pixels.threads import Job, Threads
from flatout.frameworks.pytorch.input.pixels.work import TooLateError, Work
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.guest.interruptions import is_interruption

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.pixels.owner import PixelThreads, Standing


class Engine:
    """What all fetchers of a process share."""

    def __init__(self, num_threads: int, decoded: DecodedImages) -> None:
        self.decoded = decoded
        self.threads = Threads(num_threads)
        self.seams = Seams()
        self.rows = Rows()
        self.descriptors = Descriptors()
        self.flushes = flushes_to_zero()
        """As its threads do, which have it from the one that began them."""


@dataclass
class Pending:
    """A batch under way.

    Attributes:
        indices: Of its items.
        before: The random states before the first item's code ran.
        after: The same after the last one's, where it was asked for.
        items: What the script's code gave, in order; parts of it are not computed yet.
        works: The pixel work of each.
        jobs: The same as jobs for threads.
        collation: Where tensors have their places in the batch; None where a function of the script's collates.
        whole: Whether all of it is to be computed both ways.
        due: The place of the one item that is to be, and the random states before it.
        own: What the script's own path gives for that: a batch, or items where a function of the script's collates.
        own_after: The random states after that.
        settings: Of PIL, PyTorch and the process, at the time.
        around: What it was begun with, where it is begun early.
        problem: Why it has to be fetched by the script's own path.
    """

    indices: list[int]
    before: RandomStates
    collation: Collation | None
    settings: tuple[Any, ...]
    whole: bool = False
    due: tuple[int, RandomStates] | None = None
    own: Any = None
    own_after: RandomStates | None = None
    after: RandomStates | None = None
    around: Surroundings | None = None
    items: list[Any] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    problem: BaseException | None = None

    def holds(self) -> bool:
        """Whether everything that it was begun with is still as it was."""
        return self.settings == settings_now() and self.around is not None and self.around.hold()

    def drop(self) -> None:
        """Nobody wants it any more."""
        for job in self.jobs:
            job.drop()
        for work in self.works:
            work.drop()
        self.items, self.works, self.jobs = [], [], []

    def __del__(self) -> None:
        self.drop()


class PixelFetcher:
    """What an iterator asks for the batch of some indices."""

    def __init__(
        self, owner: PixelThreads, engine: Engine, original: Any, standing: Standing, *, in_process: bool = False
    ) -> None:
        self._owner = owner
        self._engine = engine
        self._original = original
        self._in_process = in_process
        """Whether it stands for workers: then it fetches though the lever for loaders without them is not engaged, and
        what it cannot fetch is not fetched by the script's own path here, but by them."""
        self.standing = standing

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # while being copied
            raise AttributeError(name)
        return getattr(self._original, name)

    def fetch(self, indices: Any) -> Any:
        """The batch."""
        pending = self.begin(indices)
        return self._original.fetch(indices) if pending is None else self.finish(pending)

    def begin(self, indices: Any, *, states: bool = False) -> Pending | None:
        """Run the script's code for the items, and have their pixel work begun; None where plain has to fetch them.

        `states`: whether the random states are wanted afterwards.
        """
        standing = self.standing
        if not (self._owner.engaged or self._in_process) or type(indices) is not list or not indices:
            return None
        if not standing.holds() or any(type(index) is not int for index in indices):
            return None
        if self._in_process and standing.why_not_for_workers:
            return None
        if self._engine.flushes != flushes_to_zero():
            return None
        plain = self._original.collate_fn is default_collate and collation.is_plain()
        pending = Pending(indices, RandomStates(), Collation(len(indices)) if plain else None, settings_now())
        pending.whole = standing.shadow.first
        place = None if pending.whole else standing.shadow.due(len(indices))
        try:
            files: list[File] | None = [] if states else None
            self._run(pending, place, files)
            if states or pending.whole:
                pending.after = RandomStates()
            if files is not None and standing.harmless is not None:
                pending.around = Surroundings(standing.harmless.guards, self._original.dataset, indices, files)
        except BaseException as problem:  # whatever the script's code raises, its own path raises in its place
            if is_interruption(problem):
                pending.drop()
                raise
            pending.problem = problem
        return pending

    def _run(self, pending: Pending, due: int | None, files: list[File] | None) -> None:
        engine, dataset, harmless = self._engine, self._original.dataset, self.standing.harmless
        num_pictures = 0
        with engine.seams.open(harmless.straight if harmless is not None else frozenset()) as note:
            for place, index in enumerate(pending.indices):
                if place == due:
                    pending.due = place, RandomStates()
                work = Work(engine.rows, engine.descriptors, engine.decoded, files=files)
                pending.works.append(work)
                note(work)
                pending.items.append(dataset[index])
                note(None)
                tensors = work.ended()
                if pending.collation is not None:
                    pending.collation.place(tensors, place)
                for tensor in tensors:
                    tensor.flatout_settle()
                num_pictures += len(work.pictures)
                pending.jobs.append(Job(work.do))
                engine.threads.add(pending.jobs[-1])
        self.standing.noted(num_pictures, len(pending.indices))

    def finish(self, pending: Pending) -> Any:
        """The batch; random states are as plain leaves them where they were so since `begin`."""
        try:
            self._compute_own(pending)
            done = self._done(pending)
            if done and pending.collation is None:
                return self._collated_by_script(pending)
            batch = self._collated(pending, pending.collation) if done and pending.collation is not None else None
            return self._plain(pending) if batch is None else batch[0]
        finally:
            pending.drop()

    def _compute_own(self, pending: Pending) -> None:
        """By the script's own path, here, what is to be computed both ways; threads do the pixel work meanwhile."""
        if pending.problem is not None:
            return
        try:
            if pending.whole:
                pending.before.restore()
                pending.own = self._by_script(pending, pending.indices)
                pending.own_after = RandomStates()
            elif pending.due is not None:
                now, (place, states) = RandomStates(), pending.due
                states.restore()
                try:
                    pending.own = self._by_script(pending, [pending.indices[place]])
                finally:
                    now.restore()
        except Exception as problem:
            if is_interruption(problem):
                raise
            pending.problem = problem  # raised where it belongs

    def _by_script(self, pending: Pending, indices: list[int]) -> Any:
        """By the script's own path a batch; where a function of the script's collates, which is called once, items.

        What it warns of was said when the items' code ran for the first time.
        """
        with unheard():
            if pending.collation is None:
                return [self._original.dataset[index] for index in indices]
            return self._original.fetch(indices)

    def _done(self, pending: Pending) -> bool:
        """Whether the pixel work has been done, and well; then only the tensors of a batch are no plain ones yet."""
        if pending.problem is None and not self._engine.threads.finish(pending.jobs):
            pending.problem = TooLateError("the pixel work of a batch does not come to an end")
        problems = [work.problem for work in pending.works if work.problem is not None]
        if pending.problem is None and problems:
            pending.problem = problems[0]
        if pending.problem is None and pending.settings != settings_now():
            pending.problem = TooLateError("settings have changed meanwhile")
        if pending.problem is None and pending.collation is None:
            self._hand_out(pending)
        return pending.problem is None

    def _hand_out(self, pending: Pending) -> None:
        """Make plain images and tensors of all that somebody still has."""
        try:
            for work in pending.works:
                work.hand_out()
        except Exception as problem:
            if is_interruption(problem):
                raise
            pending.problem = problem  # plain raises what belongs to be raised

    def _plain(self, pending: Pending) -> Any:
        """The batch, or the error that belongs here, by the script's own path.

        Raises:
            SetAsideError: That is the path of its workers.
        """
        problem, indices = pending.problem, pending.indices
        pending.drop()
        if problem is not None:
            self.standing.failed(problem)
        if self._in_process:
            raise SetAsideError(self.standing.why_not or f"{type(problem).__name__} in an item")
        pending.problem = problem = None  # which holds frames of the script's
        pending.before.restore()
        return self._original.fetch(indices)

    # -- put together by PyTorch ---------------------------------------------------------------------------------

    def _collated(self, pending: Pending, places: Collation) -> tuple[Any] | None:
        """The batch; None where plain has to fetch it."""
        try:
            batch = places.batch(pending.items)
        except Exception as problem:
            if is_interruption(problem):
                raise
            pending.problem = problem  # plain raises what belongs to be raised
            return None
        pending.items = []
        self._hand_out(pending)
        standing = self.standing
        if pending.problem is not None:
            return None
        if pending.whole:
            standing.compared(pending.after, pending.own_after, standing.shadow.of_batch(batch, pending.own))
            return (pending.own,)
        if pending.due is not None:
            place = pending.due[0]
            if why := difference(row(batch, place), pending.own):
                standing.set_aside(f"its batches differ: item {pending.indices[place]}: {why}")
                return None
        self._owner.num_batches += 1
        standing.succeeded()
        return (batch,)

    # -- put together by the script ------------------------------------------------------------------------------

    def _collated_by_script(self, pending: Pending) -> Any:
        """The same where a function of the script's collates: it is called once, whatever happens before."""
        standing, collate, items = self.standing, self._original.collate_fn, pending.items
        if pending.whole:
            standing.shadow.num_batches += 1
            standing.compared(pending.after, pending.own_after, item_difference(items, pending.own))
            return collate(pending.own)
        if pending.due is not None:
            place = pending.due[0]
            if why := item_difference(items[place], pending.own[0]):
                standing.set_aside(f"its items differ: item {pending.indices[place]}: {why}")
                return self._plain(pending)
        self._owner.num_batches += 1
        standing.succeeded()
        return collate(items)
