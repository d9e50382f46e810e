"""Which loaders have the files of their next batches read, and of which columns?

At the beginning of each pass a few files of its first batches are watched: a column of names counts where all of its
files are opened. From then on the files of what comes next are read. In: loaders and their iterators. Out: the same
iterators; between them and their sampler stands something that looks on.
"""

from __future__ import annotations

import os
import stat
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from flatout.frameworks.pytorch.input.read_ahead.names import Column, columns_of
from flatout.frameworks.pytorch.input.read_ahead.opened import Opened
from flatout.frameworks.pytorch.input.read_ahead.order import Order
from flatout.frameworks.pytorch.input.read_ahead.readers import BUFFER_BYTES, Readers, Reading, Took, read
from flatout.guest.interruptions import let_through

NUM_WATCHED = 4
"""Items whose files are watched."""

PATIENCE = 24
"""Batches within which workers have to open them."""

MOST_ITEMS = 64
"""How many items are looked ahead, or two batches."""

MOST_MISTAKES = 3
"""How often another item may come than was foreseen, in one pass."""

NUM_TRIED = 8
"""Files by which it is judged whether a loader's files are worth reading ahead."""


class ReadAhead:
    """All loaders of a process whose files are read ahead."""

    def __init__(self) -> None:
        self.engaged = False
        self.readers = Readers()
        self.num_changes = 0
        """How often it was engaged or released."""
        self._num_read_before = 0
        self._standings: weakref.WeakKeyDictionary[DataLoader[Any], Standing] = weakref.WeakKeyDictionary()

    def engage(self, on: bool) -> None:
        """From the next batch on, or no longer."""
        self.engaged, self._num_read_before = on, self.readers.num_read
        self.num_changes += 1
        if not on:
            self.readers.drop()

    @property
    def num_files(self) -> int:
        """Read since it was engaged, of those that were not in memory."""
        return self.readers.num_read - self._num_read_before

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Look on while an iterator asks its sampler."""
        if not self.engaged or _unsuited(loader) is not None:
            return
        batches = getattr(iterator, "_sampler_iter", None)
        if batches is not None and type(batches) is not LookedOn:
            in_process = type(iterator) is _SingleProcessDataLoaderIter
            iterator._sampler_iter = LookedOn(self, batches, loader, 1 if in_process else PATIENCE)

    def standing(self, loader: DataLoader[Any]) -> Standing:
        """What is known about a loader."""
        return self._standings.setdefault(loader, Standing())

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool = False) -> str | None:
        """Why reading a loader's files ahead would bring nothing, in a few words; None where it may."""
        try:
            return _unsuited(loader) or _why_not_worth_it(loader)
        except Exception as problem:  # noqa: BLE001  a loader or dataset of any kind may be asked
            return f"{type(problem).__name__} when it was looked at"


@dataclass
class Standing:
    """What is known about a loader from former passes.

    Attributes:
        denied: Whether names were found that nobody opened: no file is read before it is seen which are opened.
    """

    denied: bool = False


class LookedOn:
    """A sampler's iterator; the files of what it will give next are read ahead."""

    def __init__(self, owner: ReadAhead, batches: Any, loader: DataLoader[Any], patience: int) -> None:
        self._owner = owner
        self._batches = batches
        self._dataset = loader.dataset  # not the loader, which may have whatever has this
        self._standing = owner.standing(loader)
        self._order = Order(batches, loader.sampler)
        self._patience = patience
        """Batches within which the files of the first one are opened."""
        self._learning: Learning | None = None
        self._columns: list[Column] = []
        self._foreseen: deque[int] = deque()
        self._num_under_way = 0
        """Items of the latest batch."""
        self._since = owner.num_changes
        self._num_mistakes = 0
        self._reading: Reading | None = None

    def __iter__(self) -> LookedOn:
        return self

    def __next__(self) -> Any:
        try:
            value = next(self._batches)
        except BaseException:
            self._end()
            raise
        if self._owner.engaged and (self._reading is None or not self._reading.over):
            try:
                self._look(value)
            except Exception as problem:  # noqa: BLE001  whatever it is, the script is not to hear of it
                self._end()
                let_through(problem)
        return value

    def __del__(self) -> None:
        reading = self.__dict__.get("_reading")
        if reading is not None:
            reading.over = True

    def _end(self) -> None:
        self._columns, self._learning = [], None
        if self._reading is not None:
            self._owner.readers.end(self._reading)

    def _look(self, value: Any) -> None:
        """A batch is going to be fetched."""
        indices = [index for index in (value if type(value) is list else [value]) if type(index) is int]
        if not indices:
            return
        readers = self._owner.readers
        if self._reading is None:
            self._reading = readers.reading()
            self._learning = Learning(self._dataset, indices)
            self._columns = [] if self._standing.denied else self._learning.guessed
            for number, index in enumerate(indices[NUM_WATCHED:], NUM_WATCHED):
                self._read(number, index)
        else:
            self._pass_by(indices)
            readers.given(self._reading, self._num_under_way)
        self._num_under_way = len(indices)
        if self._columns and self._reading.wants(self._reading.num_given):
            self._foresee(max(MOST_ITEMS, 2 * len(indices)))

    def _pass_by(self, indices: list[int]) -> None:
        """What comes now was foreseen, or else nothing is believed of what was."""
        if self._learning is not None:
            self._learn(self._learning)
        if self._since != self._owner.num_changes:
            self._since = self._owner.num_changes
            self._foreseen.clear()
        for index in indices:
            if self._foreseen and self._foreseen.popleft() != index:
                self._foreseen.clear()
                self._num_mistakes += 1
        if self._num_mistakes >= MOST_MISTAKES:
            self._end()

    def _learn(self, learning: Learning) -> None:
        found = learning.opened()
        self._patience -= 1
        if len(found) == len(learning.guessed) or self._patience <= 0:
            self._standing.denied = bool(learning.guessed) and not found
            self._columns, self._learning = found, None
            if not found:
                self._end()

    def _foresee(self, num: int) -> None:
        """Have the files read of what comes next and was not foreseen yet."""
        assert self._reading is not None
        for index in self._order.following(num)[len(self._foreseen) :]:
            self._read(self._reading.num_given + self._num_under_way + len(self._foreseen), index)
            self._foreseen.append(index)

    def _read(self, number: int, index: int) -> None:
        paths = [path for column in self._columns if (path := column.path(index)) is not None]
        if paths and self._reading is not None:
            self._owner.readers.add(self._reading, number, paths)


class Learning:
    """Which columns of a dataset have the files that are opened for its items?

    Attributes:
        guessed: Those that have names of files for the first few items of a batch.
    """

    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self._watch = Opened()
        self._told: set[str] = set()
        self._paths: list[set[str]] = []
        self.guessed: list[Column] = []
        watched = indices[:NUM_WATCHED]
        for column in columns_of(dataset, watched[0]):
            paths = {column.path(index) for index in watched}
            if all(path is not None and _is_file(path) and self._watch.add(path) for path in paths):
                self.guessed.append(column)
                self._paths.append({path for path in paths if path is not None})

    def opened(self) -> list[Column]:
        """Those of which all these files were opened."""
        self._told |= self._watch.told()
        return [column for column, paths in zip(self.guessed, self._paths, strict=True) if paths <= self._told]


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _unsuited(loader: DataLoader[Any]) -> str | None:
    """Why a loader does not come into question, whatever its items are."""
    if sys.platform != "linux":
        return "files are read ahead on Linux only"
    if isinstance(loader.dataset, IterableDataset):
        return "the script puts its batches together itself"
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return "the batches are made up by a sampler of the script's"
    return None


def _why_not_worth_it(loader: DataLoader[Any]) -> str | None:
    """The same, by what lies in its dataset, and by how quickly some of the files are read."""
    num = len(loader.dataset)  # type: ignore[arg-type]
    tried = range(num - 1, -1, -max(num // NUM_TRIED, 1))[:NUM_TRIED]
    took: list[Took] = []
    for column in columns_of(loader.dataset, num - 1) if num else ():
        for path in map(column.path, tried):
            if path is not None and (found := read(path, bytearray(BUFFER_BYTES), lambda size: True)) is not None:
                took.append(found)
        if took:
            quick = sum(one.quick for one in took)
            return "its files are in memory, or read as quickly" if quick * 2 > len(took) else None
    return "its dataset has no list of the names of its items' files"
