"""How was a loader's own iterator made, and how does a pass go on as plain where one of ours breaks?

With the order that was drawn, from the same batch: the sampler is not asked again, for it may give another order. What
was drawn of it so far comes once more, and then what it still has. In: iterators of ours, and how many batches the
script has. Out: the script's own iterator behind them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.shuffles import generators_of
from flatout.frameworks.pytorch.seams.random_states import RandomStates


@dataclass(slots=True, eq=False)
class Opened:
    """A loader's own iterator, and how it was made.

    Attributes:
        loader: Whose it is.
        iterator: What the loader's `__iter__` gives.
        settings: The worker settings that were asked for at the time.
        before: The random states before it was made, where the settings took effect; else None.
    """

    loader: DataLoader[Any]
    iterator: Any
    settings: dict[str, Any]
    before: RandomStates | None = None

    @property
    def changed(self) -> bool:
        """Whether it runs under settings of ours."""
        return self.before is not None

    def close(self) -> None:
        """End worker processes that are ours."""
        if self.changed and hasattr(self.iterator, "_shutdown_workers"):
            with contextlib.suppress(RuntimeError, OSError):  # of workers that are dead already
                self.iterator._shutdown_workers()


class Recorded:
    """What an iterator of ours has asked its sampler for. Mixed into PyTorch's iterators with workers, real or not.

    One without asks exactly as plain does.
    """

    _drawn: list[Any]
    _sampler_iter: Iterator[Any]
    _problem: Exception | None

    def begin_record(self) -> None:
        """A pass begins."""
        self._drawn, self._problem = [], None

    def _next_index(self) -> Any:
        try:
            index = super()._next_index()  # type: ignore[misc]
        except StopIteration:
            raise
        except Exception as problem:
            self._problem = problem
            raise
        self._drawn.append(index)
        return index

    def order(self) -> Iterator[Any]:
        """The order of the pass from its first batch on; this iterator is done with."""
        problem, self._problem = self._problem, None  # which would hold us for ever, as we hold it
        return _from_the_first(self._drawn, problem, self._sampler_iter)


def _from_the_first(drawn: list[Any], problem: Exception | None, rest: Iterator[Any]) -> Iterator[Any]:
    yield from drawn
    if problem is not None:
        raise problem
    yield from rest


class GivenOrder:
    """Stands for a sampler whose order is known."""

    def __init__(self, sampler: Any, order: Iterator[Any]) -> None:
        self._sampler = sampler
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        return self._order

    def __len__(self) -> int:
        return len(self._sampler)


def given_back(open_plain: Callable[..., Opened], broken: Opened, num_given: int) -> Opened:
    """The pass as the script has it, with `num_given` batches behind it; `open_plain`: opens a loader as the script."""
    loader, before = broken.loader, broken.before
    iterator = broken.iterator
    broken.close()
    now = RandomStates(generators_of(loader))
    if before is not None:
        before.restore()
    recorded = isinstance(iterator, Recorded)
    with _in_order(loader, iterator.order()) if recorded else contextlib.nullcontext():
        opened = open_plain(loader)
    opened.iterator._index_sampler = loader._index_sampler
    for _ in range(num_given):
        if getattr(opened.iterator, "_num_workers", 0):  # whose random streams have to come as far
            next(opened.iterator)
        else:
            opened.iterator._next_index()
            opened.iterator._num_yielded += 1
    if recorded or num_given:
        now.restore()
    return opened


@contextlib.contextmanager
def _in_order(loader: DataLoader[Any], order: Iterator[Any]) -> Iterator[None]:
    """Have the script's own iterator begin with this order."""
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    own = loader.__dict__[name]
    given = GivenOrder(own, order)
    loader.__dict__[name] = given
    kept = getattr(loader, "_iterator", None)
    if kept is not None:
        kept._index_sampler = given
    try:
        yield
    finally:
        loader.__dict__[name] = own
        if kept is not None:
            kept._index_sampler = own
