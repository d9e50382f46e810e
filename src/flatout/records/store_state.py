"""What is known about a kept store? One small file in its folder, and who uses the store now.

The state is written whole or not at all, and carries a checksum of its own. Two lock files lie beside it: `lock`, which
everybody holds who uses the store, and `writer`, which one of them holds. A lock ends with its process, however that
ends. In: a store's folder. Out: its `State`, or `Torn`; locks.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.errors import RecordError
from flatout.records.as_json import from_json, to_json

FORMAT = 1  # 1: first version

FILE = "state.json"
LOCK = "lock"
WRITER = "writer"
_NEW = "state.json.new"

OURS = (FILE, LOCK, WRITER, _NEW)
"""Names of files in a store's folder, beside those of its rows."""


TRIES = 4
PATIENCE_S = 0.01
"""How often a lock is tried, and how long between: who lists stores holds each for a moment."""


LEAST_FREE_BYTES = 2**30
LEAST_FREE_SHARE = 0.05
"""What is left free on the disk: the larger of the two."""


class TornError(Exception):
    """The state of a store is not whole, or of a version that this one does not know; the message says which."""


class BusyError(Exception):
    """Another process holds a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of rows.

    Attributes:
        name: Of the file, behind the generation.
        dtype: Of its values, as whose library names it.
        shape: Of one row.
        row_bytes: Of one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known about a kept store.

    Attributes:
        format: Version of this record.
        flatout: The version that made it.
        script: The script that made it.
        dataset: The class of the dataset.
        made_by: Versions of what computed the items.
        marks: What its items follow from, as a digest by kind; equal marks give equal items.
        generation: Files of rows begin with it.
        form: The containers of a batch, null in place of each column.
        parts: The files of rows.
        num_items: Items of the dataset.
        capacity: Rows for which the files have room.
        num_rows: Rows that count.
        chunk_rows: Rows that have a checksum together.
        sums: By part, the CRC-32 of each chunk, eight hexadecimal digits each.
        made_unix_s: When it was made.
        remark: Why it does not grow any more; empty where it may.
    """

    format: int
    flatout: str
    script: str
    dataset: str
    made_by: str
    marks: Mapping[str, str]
    generation: str
    form: Any
    parts: tuple[Part, ...]
    num_items: int
    capacity: int
    num_rows: int
    chunk_rows: int
    sums: Mapping[str, str]
    made_unix_s: float
    remark: str = ""

    def file(self, folder: Path, part: Part) -> Path:
        """Where the rows of a part lie."""
        return folder / f"{self.generation}-{part.name}"

    def files(self, folder: Path) -> list[Path]:
        """Where all rows lie."""
        return [self.file(folder, part) for part in self.parts]


def _content(path: Path) -> bytes:
    """What a file holds; of what is no file nothing is waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TornError("its state is no file")
        return file.read()


def read(folder: Path) -> State:
    """The state of the store in a folder.

    Raises:
        TornError: It is cut off, changed, or of another version.
        OSError: It cannot be read; `FileNotFoundError` where there is none.
    """
    raw = _content(folder / FILE)
    try:
        found = json.loads(raw)
        state, checksum = found["state"], found["checksum"]
        whole = checksum == _checksum(state)
    except (ValueError, LookupError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise TornError("its state is torn")
    if state.get("format") != FORMAT:
        raise TornError("it is of another version of flatout")
    try:
        return from_json(State, state, where=FILE)
    except RecordError:
        raise TornError("its state is torn") from None


def write(folder: Path, state: State) -> None:
    """Put this state in the place of the former one, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    value = to_json(state)
    new = folder / _NEW
    new.write_text(json.dumps({"state": value, "checksum": _checksum(value)}), encoding="utf-8")
    new.replace(folder / FILE)


def _checksum(state: Any) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


class Lock:
    """A lock on a file of a store, held until it is released or the process ends.

    Args:
        path: The file.
        alone: Whether nobody else may hold it.
        touch: Whether the file may be made, or opened for writing, for which a disk in the network asks.

    Raises:
        BusyError: Somebody else holds it.
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, alone: bool, touch: bool = True) -> None:
        for _ in range(TRIES):
            self._descriptor = _opened(path, touch=touch)
            seen = os.fstat(self._descriptor)
            self._file = seen.st_dev, seen.st_ino
            try:
                fcntl.flock(self._descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                time.sleep(PATIENCE_S)
                continue
            except OSError:
                os.close(self._descriptor)
                raise
            with contextlib.suppress(FileNotFoundError):
                now = path.stat()
                if self._file == (now.st_dev, now.st_ino):
                    return
            os.close(self._descriptor)  # removed, or made anew, just before we had it
        raise BusyError(str(path))

    def holds(self) -> bool:
        """Whether the descriptor is still ours: a script may close all that it finds open."""
        try:
            seen = os.fstat(self._descriptor)
        except OSError as problem:
            if problem.errno != errno.EBADF:  # what a handler of a signal raises, perhaps
                raise
            return False
        return (seen.st_dev, seen.st_ino) == self._file

    def release(self) -> None:
        """Give it back."""
        if self._descriptor >= 0 and self.holds():
            os.close(self._descriptor)
        self._descriptor = -1


def _opened(path: Path, *, touch: bool = True) -> int:
    if touch:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # whatever lies there, nobody waits for it


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file."""
    if not path.exists():
        return False
    try:
        descriptor = _opened(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def free_bytes(folder: Path) -> int:
    """What may still be taken of the disk of a folder, which need not be there yet; negative where it is too full."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    seen = os.statvfs(folder)
    left = max(LEAST_FREE_BYTES, int(seen.f_blocks * seen.f_frsize * LEAST_FREE_SHARE))
    return seen.f_bavail * seen.f_frsize - left
