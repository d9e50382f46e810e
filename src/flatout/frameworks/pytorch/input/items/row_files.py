"""Rows of a kept store in files: read through memory, written behind those that are there, never over them.

A part of the rows (the items' numbers, what they are made of, a column of the batch) lies in a file of its own, which
is mapped (`file_map`). Rows count from the moment at which the state says so; each chunk of them has a checksum, looked
at when a row of it is first given. A file is opened for each write, for a script may close every descriptor that it
finds and get the same number for a file of its own. In: a folder and a `State`. Out: arrays of bytes, and what was
appended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flatout.frameworks.pytorch.input.items.columns import Places
from flatout.frameworks.pytorch.input.items.file_map import Bytes, FileMap
from flatout.records.store_state import FILE, OURS, WRITER, BusyError, Lock, Part, State, TornError, write

ITEMS = Part(name="items", dtype="int64", shape=(), row_bytes=8)
"""The part that says which item a row is of."""

CHUNK_BYTES = 2**20
MOST_CHUNKS = 4096
"""A chunk holds about a MiB of rows, more where there would be more chunks than that."""

COMMIT_EVERY_S = 1.0
COMMIT_SHARE = 0.02
"""How often rows are counted, and how much of the time that may take."""


def chunk_rows(item_bytes: int, capacity: int) -> int:
    """Rows that have a checksum together.

    >>> chunk_rows(3144, 60_000), chunk_rows(2**20, 10**6)
    (334, 245)
    """
    return max(1, -(-CHUNK_BYTES // item_bytes), -(-capacity // MOST_CHUNKS))


class RowFiles:
    """The files of a store, open in this process.

    Args:
        folder: The store's.
        state: What counts.
        use: The lock of who uses the store.
        writer: The lock of who writes it; None where rows are only read.

    Raises:
        TornError: The files are not what the state says.
        OSError: They cannot be read.
    """

    def __init__(self, folder: Path, state: State, *, use: Lock, writer: Lock | None) -> None:
        self.folder = folder
        self.state = state
        self.num_rows = state.num_rows
        self._use = use
        self._writer = writer
        self._pid = os.getpid()
        self._sums = [_numbers(state.sums.get(part.name, "")) for part in state.parts]
        self._opened_rows, self._opened_sums = state.num_rows, [list(sums) for sums in self._sums]
        self._maps = self._mapped()
        shapes = [(state.capacity, part.row_bytes) for part in state.parts]
        self.rows = [one.bytes.reshape(shape) for one, shape in zip(self._maps, shapes, strict=True)]
        """For each part an array `[capacity, row_bytes]`."""
        num_chunks = -(-state.num_rows // state.chunk_rows)
        if any(len(sums) != num_chunks for sums in self._sums):
            raise TornError("its state is torn")
        self._unsure = np.ones(num_chunks, bool)
        """Chunks whose checksum was not looked at yet."""
        self._num_unsure = num_chunks
        self._next_commit_s = time.monotonic() + COMMIT_EVERY_S

    @property
    def writes(self) -> bool:
        """Whether rows may be appended here: not in a forked process, and not without the lock."""
        return self._writer is not None and os.getpid() == self._pid and self._writer.holds()

    def _mapped(self) -> list[FileMap]:
        state = self.state
        try:
            return [FileMap(state.file(self.folder, part), state.capacity * part.row_bytes) for part in state.parts]
        except (EOFError, FileNotFoundError):
            raise TornError("rows are missing") from None

    # -- reading -------------------------------------------------------------------------------------------------

    def items(self) -> Places:
        """Which item each row is of.

        Raises:
            TornError: The file is not what was written.
        """
        part = self.state.parts.index(ITEMS)
        if any(not self._is_sound(chunk, [part]) for chunk in range(len(self._unsure))):
            raise TornError("its rows are torn")
        found = self.rows[part][: self.num_rows].reshape(-1).view(np.int64).copy()
        if len(found) and (found.min() < 0 or found.max() >= self.state.num_items):
            raise TornError("its rows are torn")
        return found

    def sound(self, places: Places) -> bool:
        """Whether the rows at these places (-1 for none) are those that were written, for all that can be told."""
        if not self._num_unsure:
            return True
        chunks = np.unique(places[(places >= 0) & (places < self._opened_rows)] // self.state.chunk_rows)
        for chunk in chunks[self._unsure[chunks]].tolist():
            if not self._is_sound(chunk, range(len(self.rows))):
                return False
            self._unsure[chunk] = False
            self._num_unsure -= 1
        return True

    def _is_sound(self, chunk: int, parts: Sequence[int]) -> bool:
        first = chunk * self.state.chunk_rows
        last = min(first + self.state.chunk_rows, self._opened_rows)
        return all(zlib.crc32(self.rows[part][first:last].data) == self._opened_sums[part][chunk] for part in parts)

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, parts: Sequence[np.ndarray]) -> None:
        """Write rows behind those that are there; they count later.

        Args:
            parts: For each part the new rows.

        Raises:
            OSError: They cannot be written, for example because the disk is full.
        """
        raw = [np.ascontiguousarray(one).reshape(len(one), -1).view(np.uint8) for one in parts]
        first, num = self.num_rows, len(raw[0])
        for part, rows in zip(self.state.parts, raw, strict=True):
            _write_at(self.state.file(self.folder, part), rows.data.cast("B"), first * part.row_bytes)
        for sums, rows in zip(self._sums, raw, strict=True):
            for chunk, piece in self._by_chunk(first, rows):
                sums[chunk:] = [zlib.crc32(piece.data, sums[chunk] if chunk < len(sums) else 0)]
        self.num_rows = first + num

    def _by_chunk(self, first: int, rows: Bytes) -> Iterator[tuple[int, Bytes]]:
        place = first
        while place < first + len(rows):
            chunk = place // self.state.chunk_rows
            end = min((chunk + 1) * self.state.chunk_rows, first + len(rows))
            yield chunk, rows[place - first : end - first]
            place = end

    @property
    def due(self) -> bool:
        """Whether it is time to count what was appended."""
        return self.num_rows > self.state.num_rows and time.monotonic() >= self._next_commit_s

    def commit(self) -> None:
        """Count what was appended.

        Raises:
            OSError: It cannot be said.
        """
        begun_s = time.monotonic()
        sums = {part.name: _text(sums) for part, sums in zip(self.state.parts, self._sums, strict=True)}
        state = dataclasses.replace(self.state, num_rows=self.num_rows, sums=sums)
        write(self.folder, state)
        self.state = state
        self.wait_for(time.monotonic() - begun_s)

    def wait_for(self, took_s: float) -> None:
        """The next time to count, where it took so long this time."""
        self._next_commit_s = time.monotonic() + max(COMMIT_EVERY_S, took_s / COMMIT_SHARE)

    def go_on_in_memory(self) -> None:
        """Rows behind those that were appended are this process's own: they may be written to.

        Raises:
            OSError: There is no memory.
        """
        for one, part in zip(self._maps, self.state.parts, strict=True):
            one.own_from(self.num_rows * part.row_bytes)

    def remove(self) -> bool:
        """Have nobody open these rows again; whether that could be done: not while another process writes them."""
        writer = self._writer
        try:
            if writer is None or not self.writes:
                writer = Lock(self.folder / WRITER, alone=True)
            (self.folder / FILE).unlink()
        except (BusyError, OSError):
            return False
        finally:
            if writer is not None and writer is not self._writer:
                writer.release()
        return True

    def stop_writing(self) -> None:
        """Leave the files as they are; what was not counted yet does not count."""
        writer, self._writer = self._writer, None
        if writer is not None and os.getpid() == self._pid:
            writer.release()

    def close(self) -> None:
        """Give the locks back; arrays that are still in use stay."""
        self.stop_writing()
        if os.getpid() == self._pid:  # a lock is shared with forked processes
            self._use.release()


def make(folder: Path, state: State, *, use: Lock, writer: Lock) -> RowFiles:
    """Files for a new store, in place of what lay in the folder.

    Raises:
        OSError: They cannot be made.
    """
    try:
        for part in state.parts:
            descriptor = os.open(state.file(folder, part), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(descriptor, state.capacity * part.row_bytes)  # takes nothing until it is written to
            finally:
                os.close(descriptor)
        write(folder, state)
    except OSError:
        for path in state.files(folder):
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    remove_others(folder, state)
    return RowFiles(folder, state, use=use, writer=writer)


def remove_others(folder: Path, state: State) -> None:
    """Remove files of former generations; who still reads them keeps what he has."""
    kept = {path.name for path in state.files(folder)} | set(OURS)
    for path in folder.iterdir():
        if path.name not in kept and path.name.partition("-")[2].startswith(("items", "made-", "column-")):
            with contextlib.suppress(OSError):
                path.unlink()


def grown(files_of: Path, state: State, capacity: int) -> State:
    """The state with room for more rows.

    Raises:
        OSError: The files cannot be made longer.
    """
    for part in state.parts:
        os.truncate(state.file(files_of, part), capacity * part.row_bytes)
    state = dataclasses.replace(state, capacity=capacity)
    write(files_of, state)
    return state


def _write_at(path: Path, raw: memoryview, offset: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        while raw:
            written = os.pwrite(descriptor, raw, offset)
            raw, offset = raw[written:], offset + written
    finally:
        os.close(descriptor)


def _text(sums: Sequence[int]) -> str:
    return "".join(f"{one:08x}" for one in sums)


def _numbers(text: str) -> list[int]:
    try:
        return [int(text[place : place + 8], 16) for place in range(0, len(text), 8)]
    except ValueError:
        raise TornError("its state is torn") from None
