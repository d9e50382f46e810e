"""What does a process do that makes batches ahead? It stands where the script will stand, and tells what it did.

PyTorch's worker loop fetches from a dataset and puts batches together; here both are wrapped. In: an index with its
place in the order. Out: a batch, with where the generators stood before and after it, and whatever the code did besides
that a process apart may not do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils import pin_memory as pinning
from torch.utils.data._utils import worker as torch_worker

from flatout.frameworks.pytorch.input.ahead.acts import Acts
from flatout.frameworks.pytorch.input.ahead.generators import Draws, Place, skip
from flatout.frameworks.pytorch.input.watch import Watch
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch that is asked for: its place since the processes began, and what the sampler gave for it."""

    position: int
    index: Any


@dataclass(slots=True)
class Made:
    """A batch made ahead.

    Attributes:
        batch: As the script's code gave it; None where there is a problem.
        before: Where the generators stood; None where they have not moved.
        after: Where they stand now.
        problem: What the code did besides, or was about to do; or empty.
    """

    batch: Any
    before: Place | None
    after: Place | None
    problem: str = ""

    def pin_memory(self) -> Made:
        """As a loader that pins its batches does."""
        self.batch = pinning.pin_memory(self.batch)
        return self


class Items:
    """The script's dataset in such a process, and how its items become a batch.

    Args:
        watch: Of the script's dataset and `collate_fn`.
        start: Where the generators stand before the training that comes before the first batch.
        batch: What a batch draws; None where that differs and one process makes them all.
        gap: What the training draws between two.
        script: What is open in the script's process (`opened_now`), and how many threads PyTorch has there.
    """

    def __init__(
        self,
        watch: Watch,
        start: Place,
        batch: Draws | None,
        gap: Draws,
        script: tuple[Mapping[int, tuple[int, int]], int],
    ) -> None:
        self._dataset, self._collate = watch.things
        self._watch, self._start = watch, start
        self._batch, self._gap, self._script = batch or Draws(), gap, script
        self._former: int | None = None
        self._before = start
        self._acts: Acts

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, wanted: Wanted) -> Any:
        self._begin(wanted.position)
        at_once = getattr(self._dataset, "__getitems__", None)
        try:
            return at_once(wanted.index) if at_once else [self._dataset[index] for index in wanted.index]
        except Exception as problem:  # noqa: BLE001  the script's code
            return self._stopped(problem)

    def __getitem__(self, wanted: Wanted) -> Any:
        self._begin(wanted.position)
        try:
            return self._dataset[wanted.index]
        except Exception as problem:  # noqa: BLE001  the script's code
            return self._stopped(problem)

    def _begin(self, position: int) -> None:
        """Stand where the script will when it asks for this batch."""
        own = self._watch.generators
        if self._former is None:
            torch_worker._worker_info = None  # the script's own process has none
            self._acts = Acts(*self._script)
            self._watch.protect()
            self._start.put(own)
            skip(self._gap + (self._batch + self._gap).times(position))
        else:
            skip(self._gap + (self._batch + self._gap).times(position - self._former - 1))
        self._former = position
        self._before = Place.now(own)
        self._acts.begin()

    def _stopped(self, problem: Exception) -> Made:
        """What takes the place of items that could not be made, for what they tried.

        Raises:
            Exception: They raise by themselves.
        """
        if not (tried := self._acts.end()):
            raise problem
        return Made(None, None, None, tried)

    def collate(self, items: Any) -> Made:
        """The batch, and what came with it."""
        if isinstance(items, Made):
            return items
        try:
            batch = _alone(self._collate(items))
        except Exception as problem:  # noqa: BLE001  the script's code
            return self._stopped(problem)
        if any(type(leaf) is object for leaf in tree_leaves(batch)):
            self._acts.note("gives an object that is nothing but itself")
        if tried := self._acts.end():
            return Made(None, None, None, tried)
        if (name := self._watch.changed()) is not None:
            return Made(None, None, None, f"changes `{name}`")
        after = Place.now(self._watch.generators)
        moved = after != self._before
        return Made(batch, self._before if moved else None, after if moved else None)


def _alone(batch: Any) -> Any:
    """The same without parts of larger memory, which would be sent whole."""
    num_bytes: Counter[int] = Counter()
    for tensor in tensors_of(batch):
        if tensor.layout is torch.strided:
            num_bytes[tensor.untyped_storage().data_ptr()] += tensor.nbytes

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.requires_grad:
            return tensor
        memory = tensor.untyped_storage()
        return tensor.clone() if memory.nbytes() > num_bytes[memory.data_ptr()] else tensor

    return map_tensors(alone, batch, objects=False)
