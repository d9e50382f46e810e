"""Which loaders have the files of their next batches read, and of which columns?

A loader's sampler is asked a few batches early, where it is of a kind that cannot tell (`shuffles`), and the files of
these are read. In: loaders and their iterators. Out: the same iterators; between them and their sampler stands
something that holds the batches that were drawn early.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import Any

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.read_ahead.names import Column, columns_of
from flatout.frameworks.pytorch.input.read_ahead.readers import Reading, Wanted, read
from flatout.frameworks.pytorch.input.shuffles import why_not_ahead
from flatout.guest.interruptions import let_through

NUM_TRIED = 4
"""Items whose names have to be those of files."""

MOST_ITEMS = 64
"""How many items are looked ahead, or two batches."""

NUM_TIMED = 8
"""Files by which it is judged whether a loader's files are worth reading ahead."""


class ReadAhead(Wanted):
    """All loaders of a process whose files are read ahead."""

    def engage(self, on: bool) -> None:
        """From the next batch on, or no longer."""
        self.engaged, self.num_files = on, 0

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Stand between an iterator and its sampler."""
        batches = getattr(iterator, "_sampler_iter", None)
        if self.engaged and batches is not None and type(batches) is not DrawnEarly and _unsuited(loader) is None:
            num_asked = iterator._num_yielded + len(getattr(iterator, "_ahead", ()))
            num_drawn = max(num_asked, getattr(iterator, "_send_idx", 0))
            iterator._sampler_iter = DrawnEarly(self, batches, loader, num_drawn)

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool = False) -> str | None:
        """Why reading a loader's files ahead would bring nothing, in a few words; None where it may."""
        try:
            return _unsuited(loader) or _why_not_worth_it(loader)
        except Exception as problem:  # noqa: BLE001  a loader or dataset of any kind may be asked
            return f"{type(problem).__name__} when it was looked at"


class DrawnEarly:
    """A sampler's iterator of which some batches are drawn early; their files are read.

    Not the last one: a generator of the script's own may be moved by whoever comes to the end of the order.
    """

    def __init__(self, owner: ReadAhead, batches: Any, loader: DataLoader[Any], num_drawn: int) -> None:
        self._owner = owner
        self._batches = batches
        self._dataset = loader.dataset  # not the loader, which may have whatever has this
        self._num_left = len(loader.batch_sampler) - 1 - num_drawn  # type: ignore[arg-type]
        """Batches that may still be drawn early."""
        self._drawn: deque[Any] = deque()
        self._num_items = 0
        """Of the batches that were drawn, those that were given included."""
        self._num_latest = 0
        """Items of the latest batch that was given."""
        self._columns: list[Column] | None = None
        self._reading = Reading(owner)

    def __iter__(self) -> DrawnEarly:
        return self

    def __next__(self) -> Any:
        reading = self._reading
        try:
            value = self._drawn.popleft() if self._drawn else self._next()
        except BaseException:
            reading.end()
            raise
        reading.num_given += self._num_latest
        self._num_latest = len(value)
        if self._owner.engaged and not reading.over:
            try:
                self._look(value)
            except Exception as problem:  # noqa: BLE001  whatever it is, the script is not to hear of it
                reading.end()
                let_through(problem)
        return value

    def __del__(self) -> None:
        if (reading := self.__dict__.get("_reading")) is not None:
            reading.over = True  # its threads end by themselves: here no lock is taken, for any thread may come by

    def _next(self) -> Any:
        value = next(self._batches)
        self._num_left -= 1
        self._num_items += len(value)
        return value

    def _look(self, value: list[Any]) -> None:
        """A batch is going to be fetched: have the files read of those behind it."""
        reading = self._reading
        if self._columns is None:
            self._columns = [
                column
                for column in columns_of(self._dataset, value[0])
                if all(os.path.isfile(column.path(index) or "") for index in value[:NUM_TRIED])
            ]
        most = reading.num_given + len(value) + max(MOST_ITEMS, 2 * len(value))
        while self._columns and self._num_left > 0 and self._num_items < most:
            number = self._num_items
            self._drawn.append(self._next())
            for place, index in enumerate(self._drawn[-1], number):
                paths = [path for column in self._columns if (path := column.path(index)) is not None]
                if paths and reading.wants(place):
                    reading.add(place, paths)


def _unsuited(loader: DataLoader[Any]) -> str | None:
    """Why a loader does not come into question, whatever its items are."""
    return why_not_ahead(loader, of_list=False) if sys.platform == "linux" else "files are read ahead on Linux only"


def _why_not_worth_it(loader: DataLoader[Any]) -> str | None:
    """The same, by what lies in its dataset, and by how quickly some of the files are read."""
    num = len(loader.dataset)  # type: ignore[arg-type]
    tried = range(num - 1, -1, -max(num // NUM_TIMED, 1))[:NUM_TIMED]
    for column in columns_of(loader.dataset, num - 1) if num else ():
        paths = [path for path in map(column.path, tried) if path is not None]
        took = [slow for path in paths if (slow := read(path)) is not None]
        if took:
            return "its files are in memory, or read as quickly" if sum(took) * 2 < len(took) else None
    return "its dataset has no list of the names of its items' files"
