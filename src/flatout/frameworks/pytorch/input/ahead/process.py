"""What does a process do that makes batches ahead? It stands where the script will stand, and tells what it did.

PyTorch's worker loop fetches from a dataset and puts batches together; here both are wrapped. In: an index with its
place in the order. Out: a batch, with where the generators stood before and after it, and whatever the code did besides
that a process apart may not do.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from torch.utils.data._utils import pin_memory as pinning
from torch.utils.data._utils import worker as torch_worker

from flatout.frameworks.pytorch.input.ahead.generators import Draws, Place, skip
from flatout.frameworks.pytorch.input.dataset_state import marks

_ACTS = {
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.kill", "os.fork",
    "os.system", "os.posix_spawn", "subprocess.Popen", "shutil.rmtree", "socket.connect", "socket.sendto",
    "socket.sendmsg", "sqlite3.connect",
}  # fmt: skip
"""What a process apart would do a second time, or where the script cannot see it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch that is asked for: its place since the processes began, and what the sampler gave for it."""

    position: int
    index: Any


@dataclass(slots=True)
class Made:
    """A batch made ahead.

    Attributes:
        batch: As the script's code gave it.
        before: Where the generators stood; None where they have not moved.
        after: Where they stand now.
        problem: What the code did besides, or empty.
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
        dataset: The script's.
        collate: The script's `collate_fn`.
        start: Where the generators stand before the training that comes before the first batch.
        batch: What a batch draws; None where that differs and one process makes them all.
        gap: What the training draws between two.
    """

    def __init__(self, dataset: Any, collate: Any, start: Place, batch: Draws | None, gap: Draws) -> None:
        self._dataset, self._collate, self._start = dataset, collate, start
        self._batch, self._gap = batch or Draws(), gap
        self._former: int | None = None
        self._before = start
        self._acts: list[str] = []
        self._num_looks = 0
        self._marks: Any = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, wanted: Wanted) -> Any:
        self._begin(wanted.position)
        at_once = getattr(self._dataset, "__getitems__", None)
        return at_once(wanted.index) if at_once else [self._dataset[index] for index in wanted.index]

    def __getitem__(self, wanted: Wanted) -> Any:
        self._begin(wanted.position)
        return self._dataset[wanted.index]

    def _begin(self, position: int) -> None:
        """Stand where the script will when it asks for this batch."""
        if self._former is None:
            torch_worker._worker_info = None  # the script's own process has none
            sys.addaudithook(self._heard)
            sys.stdout, sys.stderr = _Told(self._acts), _Told(self._acts)
            self._start.put()
            skip(self._gap + (self._batch + self._gap).times(position))
        else:
            skip(self._gap + (self._batch + self._gap).times(position - self._former - 1))
        self._former = position
        if self._is_due():
            self._marks = marks(self._dataset, self._collate, closely=False)
        self._acts.clear()
        self._before = Place.now()

    def _is_due(self) -> bool:
        self._num_looks += 1
        return self._num_looks & (self._num_looks - 1) == 0  # the 1st, 2nd, 4th, 8th ...

    def collate(self, items: Any) -> Made:
        """The batch, and what came with it."""
        batch = self._collate(items)
        after = Place.now()
        problem = self._acts[0] if self._acts else ""
        if self._marks is not None and marks(self._dataset, self._collate, closely=False) != self._marks:
            problem = problem or "changes its dataset"
        self._marks = None
        moved = after != self._before
        return Made(batch, self._before if moved else None, after if moved else None, problem)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() != threading.main_thread().ident:  # of those that hand batches over
            return
        if event in _ACTS:
            self._acts.append(f"does `{event}`")
        elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._acts.append("writes to a file")


class _Told(io.TextIOBase):
    """Where a process apart prints: the script's own will print it."""

    def __init__(self, acts: list[str]) -> None:
        self._acts = acts

    def write(self, text: str) -> int:
        self._acts.append("prints")
        return len(text)

    def writable(self) -> bool:
        return True
