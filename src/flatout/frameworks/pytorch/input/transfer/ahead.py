"""Which batches may be taken from a loader before the script asks, and which wait to be given?

Only batches that worker processes have ready, in an order that nobody can tell was asked for early. The end of a pass,
and what is raised on the way, come when the script gets there. In: an iterator. Out: its batches in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.shuffles import generators_of, why_not_ahead
from flatout.frameworks.pytorch.input.transfer.known import Habit, Leaf

NUM_AHEAD = 1
"""Batches taken early: a copy that takes longer than a step is not made faster by beginning two."""

Fetch = Callable[[Any], Any]


class Line:
    """The batches of one pass."""

    def __init__(self, loader: DataLoader[Any], habit: Habit) -> None:
        self.habit = habit
        self.given: list[Leaf] = []
        """What is known of the tensors of the batch that the script has, where their copies were begun early."""
        self.begun: list[Leaf] = []
        """The same of the batch that waits."""
        self._may = _may_be_asked_early(loader)
        self._waiting: deque[tuple[Any, Exception | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def next(self, iterator: Any, fetch: Fetch) -> Any:
        """The batch that is next."""
        if not self._waiting:
            return fetch(iterator)
        batch, problem = self._waiting.popleft()
        if problem is not None:
            raise problem
        return batch

    def early(self, iterator: Any, fetch: Fetch) -> Iterator[Any]:
        """Batches that can be taken now without waiting."""
        while self._may and len(self._waiting) < NUM_AHEAD and _ready(iterator):
            try:
                batch = fetch(iterator)
            except Exception as problem:  # noqa: BLE001  it is raised when the script gets there
                self._waiting.append((None, problem))
                self._may = False
                return
            self._waiting.append((batch, None))
            yield batch


def _may_be_asked_early(loader: DataLoader[Any]) -> bool:
    try:
        return getattr(loader, "in_order", True) and not generators_of(loader) and why_not_ahead(loader) is None
    except Exception:  # noqa: BLE001  a loader of any kind may be asked
        return False


def _ready(iterator: Any) -> bool:
    """Whether worker processes have the next batch ready, or one near it, and the pass is not at its end."""
    tasks, queue = getattr(iterator, "_task_info", None), getattr(iterator, "_data_queue", None)
    if not tasks or queue is None:
        return False
    task = tasks.get(iterator._rcvd_idx)
    return task is not None and (len(task) == 2 or not queue.empty())
