"""Which store on the disk is that of a dataset, and what may this process do with it?

A store is found by what its items follow from. Where there is none, the dataset's own place gets a new one: its name
comes from the script and the dataset's class, so that a store of former data or code makes room for it. One process
writes; others read what counted when they came. Whatever is refused here costs the disk only: the items are then kept
in memory. In: an `Identity`. Out: a `Kept`, and a line for each store, to be said in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

import flatout
from flatout.frameworks.pytorch.input.items import row_files
from flatout.frameworks.pytorch.input.items.identity import Identity
from flatout.frameworks.pytorch.input.items.kept import Kept
from flatout.frameworks.pytorch.input.items.row_files import RowFiles
from flatout.guest.interruptions import let_through
from flatout.records.store_folder import paths
from flatout.records.store_state import LOCK, PATIENCE_S, TRIES, WRITER, BusyError, Lock, Part, State, TornError, read

MOST_PLACES = 8
"""Stores of one description that may be in use at the same time, as those of several folds are."""

MOST_LINES = 20


class Shelf:
    """The kept stores of one process.

    Args:
        folders: The folder that is written to, then others that are only read; empty: nothing is kept on the disk.
    """

    def __init__(self, folders: Sequence[str] = ()) -> None:
        self.folders = tuple(Path(one) for one in folders)
        self._num_kept = 0
        self._said: dict[str, tuple[str, dict[str, None]]] = {}
        """By store, or by line where it is none's: the line, and what is to be said beside it."""
        self._all: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._open: weakref.WeakValueDictionary[Path, Kept] = weakref.WeakValueDictionary()
        """Who has opened a store last."""

    def say(self, line: str, notes: Sequence[str] = (), about: str = "") -> None:
        """Have a line said in the end, in place of the former one about the same store."""
        former = self._said.get(about or line, ("", {}))[1]
        self._said[about or line] = line, former | dict.fromkeys(notes)

    def lines(self) -> list[str]:
        """All that is to be said; every store is brought to an end for it."""
        for kept in sorted(self._all, key=lambda one: one.number):
            kept.finish()
        found = [f"{line} ({'; '.join(notes)})" if notes else line for line, notes in self._said.values()]
        return found[:MOST_LINES]

    def kept(
        self,
        identity: Identity,
        dataset: Any,
        num_items: int,
        right: Callable[[], bool],
        rows_for: Callable[[int], int],
    ) -> Kept:
        """The store of a dataset's items on the disk; nothing is opened yet.

        Args:
            identity: What the items follow from.
            dataset: The dataset.
            num_items: How many there are.
            right: Whether what was computed is still taken for what the script gives.
            rows_for: For so many bytes an item, how many items memory has room for.
        """
        self._num_kept += 1
        kept = Kept(self, identity, about(dataset, num_items), right, rows_for)
        kept.number = self._num_kept
        self._all.add(kept)
        return kept

    # -- finding -------------------------------------------------------------------------------------------------

    def opened(self, kept: Kept) -> RowFiles | None:
        """A store with these items, to be written where nobody else writes it; None where there is none."""
        for number, folder in enumerate(self.folders):
            for path in _by_likelihood(folder, kept.about.name):
                found = self._opened_at(path, kept, ours=number == 0)
                if found is not None:
                    return found
        return None

    def _opened_at(self, path: Path, kept: Kept, *, ours: bool) -> RowFiles | None:
        try:
            if read(path).marks != kept.identity.marks:
                return None
            self._take_over(path)
            use = Lock(path / LOCK, alone=False, touch=ours)
            try:
                return self._files(path, kept, use, writes=ours and may_write())
            except BaseException:
                use.release()
                raise
        except TornError as problem:
            kept.found_torn(str(problem))
        except BusyError:
            kept.note("it is being removed")
        except OSError as problem:
            let_through(problem)
            kept.note(f"it cannot be read: {problem.strerror or problem}")
        return None

    def _files(self, path: Path, kept: Kept, use: Lock, *, writes: bool) -> RowFiles | None:
        writer = None
        if writes:
            try:
                writer = Lock(path / WRITER, alone=True)
                _try_to_write(path)
            except BusyError:
                kept.note("another run writes it, and this one reads")
            except OSError as problem:
                _release(writer)
                writer = None
                let_through(problem)
                kept.note(f"only read: {problem.strerror or problem}")
        try:
            state = read(path)  # under the lock; it may be another one by now
            if state.marks != kept.identity.marks:
                _release(writer)
                use.release()
                return None
            if writer is not None:
                with contextlib.suppress(OSError):
                    state = kept.with_room(path, state)
            found = RowFiles(path, state, use=use, writer=writer)
            found.items()
        except BaseException:
            _release(writer)
            raise
        if writes:
            with contextlib.suppress(OSError):
                os.utime(path / LOCK)
        self._open[path] = kept
        return found

    def _take_over(self, path: Path) -> None:
        """Another loader of this process may write the store that is wanted now: it reads from here on."""
        other = self._open.get(path)
        if other is not None:
            other.hand_over()

    # -- making --------------------------------------------------------------------------------------------------

    def made(self, kept: Kept, form: Any, parts: tuple[Part, ...], capacity: int, num_items: int) -> RowFiles | None:
        """A new store in the first place that is free; None, and why, where there is none."""
        if not may_write():
            kept.note("only the first rank writes")
            return None
        try:
            self.folders[0].mkdir(parents=True, exist_ok=True)
            for path in kept.about.places(self.folders[0]):
                try:
                    return self._made_at(path, kept, form, parts, capacity, num_items)
                except BusyError:
                    if _is_being_made(path, kept):
                        kept.note("another run is making it, and this one keeps its own in memory")
                        return None
            kept.note("other runs use its place on the disk")
        except OSError as problem:
            let_through(problem)
            kept.note(f"the disk refuses it: {problem.strerror or problem}")
        return None

    def _made_at(
        self, path: Path, kept: Kept, form: Any, parts: tuple[Part, ...], capacity: int, num_items: int
    ) -> RowFiles:
        path.mkdir(exist_ok=True)
        use = Lock(path / LOCK, alone=False)
        writer = None
        try:
            writer = Lock(path / WRITER, alone=True)
            if (why := _why_anew(path, kept)) is not None:
                kept.note(f"made anew: {why}")
            state = State(
                format=1,
                flatout=flatout.__version__,
                script=script(),
                dataset=kept.about.dataset,
                made_by=kept.identity.made_by,
                marks=kept.identity.marks,
                generation=os.urandom(4).hex(),
                form=form,
                parts=parts,
                num_items=num_items,
                capacity=capacity,
                num_rows=0,
                chunk_rows=row_files.chunk_rows(sum(part.row_bytes for part in parts), capacity),
                sums={},
                made_unix_s=time.time(),
            )
            found = row_files.make(path, state, use=use, writer=writer)
        except BaseException:
            _release(writer)
            use.release()
            raise
        self._open[path] = kept
        return found


# -- what it is called, and who may write -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class About:
    """What a dataset is called.

    Attributes:
        dataset: Its class; of a `Subset`, that of what it is a part of.
        name: Of its store: the script, the class, and four digits for whatever else tells it from others.
    """

    dataset: str
    name: str

    def places(self, folder: Path) -> list[Path]:
        """Where its store may lie."""
        return [folder / self.name, *(folder / f"{self.name}-{number}" for number in range(2, MOST_PLACES + 1))]


def about(dataset: Any, num_items: int) -> About:
    """What a dataset is called."""
    kinds = [type(dataset)]
    while type(dataset) is Subset:
        dataset = dataset.dataset
        kinds.append(type(dataset))
    told = (script(), num_items, *(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
    digits = hashlib.blake2b(repr(told).encode("utf-8", "surrogatepass"), digest_size=2).hexdigest()
    name = "-".join(filter(None, (_plain(Path(script()).stem), _plain(kinds[-1].__name__), digits)))
    return About(kinds[-1].__name__, name)


def _plain(word: str) -> str:
    """A word as it can be typed."""
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_")[:24]


def script() -> str:
    """The file of the program; empty where there is none."""
    return os.path.realpath(found) if (found := getattr(sys.modules.get("__main__"), "__file__", None)) else ""


def may_write() -> bool:
    """Whether this is the process of several that writes: the first rank, or the one that is nobody's child."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    rank = os.environ.get("RANK", "")
    return rank == "0" if rank.isdecimal() else multiprocessing.parent_process() is None


def _by_likelihood(folder: Path, name: str) -> Iterator[Path]:
    """The stores in a folder, those of that name first."""
    found = paths(folder)
    yield from sorted(found, key=lambda path: not path.name.startswith(name))


def _try_to_write(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied")


def _release(lock: Lock | None) -> None:
    if lock is not None:
        lock.release()


def _is_being_made(path: Path, kept: Kept) -> bool:
    """Whether who writes there makes a store of the same items; it says so soon after it has begun."""
    for _ in range(TRIES):
        try:
            return read(path).marks == kept.identity.marks
        except (TornError, OSError):
            time.sleep(PATIENCE_S)
    return False


def _why_anew(path: Path, kept: Kept) -> str | None:
    """Why what lies at a place is not to be used; None where nothing does.

    Raises:
        BusyError: It can be used: another run has just made it.
    """
    try:
        state = read(path)
    except FileNotFoundError:
        return None
    except TornError as problem:
        return str(problem)
    for kind, mark in kept.identity.marks.items():
        if state.marks.get(kind) != mark:
            return f"it was made by {state.made_by}" if kind == "versions" else _CHANGED[kind]
    if not kept.torn:
        raise BusyError(str(path))
    return kept.torn


_CHANGED = {
    "code": "the code of its dataset has changed",
    "parameters": "what goes into all of its items has changed",
    "data": "its data have changed",
}
