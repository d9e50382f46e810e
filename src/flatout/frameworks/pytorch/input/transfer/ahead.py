"""Which batches may be taken from a loader before the script asks, which wait to be given, and which were?

A tensor is known by identity, count of changes and place in memory, and is not kept alive. Early come only batches
that worker processes have ready, in an order that nobody can tell was asked for early. The end of a pass, and what is
raised on the way, come when the script gets there. In: an iterator. Out: its batches in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary

from flatout.frameworks.pytorch.input.shuffles import generators_of, why_not_ahead

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.transfer.rows import Rows
    from flatout.frameworks.pytorch.input.transfer.staging import Copy

NUM_AHEAD = 1
"""Batches taken early: a copy that takes longer than a step is not made faster by beginning two."""

Fetch: TypeAlias = Callable[[Any], Any]
Habit: TypeAlias = dict[int, torch.device]
"""Which places of a loader's batches the script copies, and where to: found by watching it."""


@dataclass(eq=False)
class TensorInfo:
    """What is known of one tensor of a batch.

    Attributes:
        rows: The kept rows that it consists of.
        copy: A copy that was begun before anybody asked.
        habit: That of its loader, and `place` where it is in the batch.
    """

    rows: Rows | None = None
    copy: Copy | None = None
    habit: Habit | None = None
    place: int = 0


class Known:
    """The tensors of batches that were given lately."""

    def __init__(self) -> None:
        self._entries = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    def know(self, tensor: torch.Tensor, leaf: TensorInfo) -> None:
        """From now on this is known of a tensor, as long as it stays what it is."""
        self._entries[tensor] = tensor._version, tensor.data_ptr(), leaf

    def take(self, tensor: torch.Tensor) -> TensorInfo | None:
        """What is known, for the last time; None where the tensor was changed, as far as PyTorch counts."""
        version, place, leaf = self._entries.pop(tensor, (None, None, None))
        return leaf if (version, place) == (tensor._version, tensor.data_ptr()) else None

    def forget(self) -> None:
        """Nothing is known any more."""
        self._entries.clear()


class Line:
    """The batches of one pass."""

    def __init__(self, loader: DataLoader[Any], habit: Habit) -> None:
        self.habit = habit
        self.given: list[TensorInfo] = []
        """What is known of the tensors of the batch that the script has, where their copies were begun early."""
        self.begun: list[TensorInfo] = []
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
