"""Where do decoded images lie, and which are there? In memory that all processes share which are forked later.

Records follow one another: how long they are, the pieces of bytes that a decoder was given, what it answered to each,
and the pixels in the end. One process writes at a time. Keeping takes time, most of it until the kernel has cleared
the memory: so much is spent on it as it has saved so far, and a small part of what decoding takes. In: what a decoder
did. Out: the same, in any process.
"""

from __future__ import annotations

import contextlib
import marshal
import mmap
import multiprocessing
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flatout.frameworks.pytorch.input.budget import LEAST_FREE_BYTES, may_take_bytes
from flatout.machine.control_groups import free_memory_bytes

LOOK_EVERY_BYTES = 2**26
"""How often it is seen while more is kept whether memory is still free."""

PATIENCE_S = 1.0
"""How long another process may be writing; one that takes longer has been killed, and nothing more is kept."""

CREDIT_NS = 10**8
"""What may be spent on keeping before anything is saved, and `SHARE` of the time that decoding takes."""

SHARE = 0.05

_ON, _END, _NUM, _WRONG, _FULL, _LEFT_NS = range(6)
"""Numbers at the beginning of the memory: whether it is used, where free space begins, how many images were found,
whether one was wrong, whether no more are kept, and the time that is left to spend."""

_NUMBERS_BYTES = 64
_HEAD = struct.Struct("<QQ")
"""Bytes of a record, and how many of them describe it."""

Answer = tuple[int, int]


class Kept(NamedTuple):
    """A decoded image: the lengths of its pieces, what was answered to each, and where they lie, the pixels last.

    `took_ns`: how long it took to decode.
    """

    lengths: Sequence[int]
    answers: Sequence[Answer]
    took_ns: int
    begin: int
    end: int

    def place(self, number: int) -> slice:
        """Where a piece lies; behind the last one, the pixels."""
        begin = self.begin + sum(self.lengths[:number])
        return slice(begin, begin + self.lengths[number] if number < len(self.lengths) else self.end)


class DecodedImages:
    """The decoded images of a process and of those that it forks."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, max(_NUMBERS_BYTES, may_take_bytes(free_memory_bytes())))
        self._numbers = memoryview(self._memory)[:_NUMBERS_BYTES].cast("q")
        self._numbers[_LEFT_NS] = CREDIT_NS
        self._numbers[_END] = self._seen = _NUMBERS_BYTES
        self._lock = multiprocessing.get_context("fork").Lock()
        self._found: dict[bytes, Kept] = {}

    def engage(self, on: bool) -> None:
        """Have all processes use what is kept, and keep more, or no longer."""
        self._numbers[_ON] = on

    @property
    def engaged(self) -> bool:
        """Whether they do."""
        return bool(self._numbers[_ON] and not self._numbers[_WRONG])

    def set_aside(self) -> None:
        """An image was not what it should have been: nothing is used any more."""
        self._numbers[_WRONG] = 1

    @property
    def num_found(self) -> int:
        """Images that were there when they were asked for, in all processes."""
        return self._numbers[_NUM]

    def count(self) -> int:
        """One more was; how many these are."""
        self._numbers[_NUM] += 1
        return self._numbers[_NUM]

    def saved(self, time_ns: int) -> None:
        """So much time was saved; less than none where it was spent."""
        self._numbers[_LEFT_NS] += time_ns

    def find(self, key: bytes) -> Kept | None:
        """What is kept under a key."""
        self.look_through()
        return self._found.get(key)

    def read(self, place: slice) -> bytes:
        """A copy of what lies there."""
        return self._memory[place]

    @property
    def may_keep(self) -> bool:
        """Whether there is time to keep an image, and room, as far as is known."""
        return self._numbers[_LEFT_NS] > 0 and not self._numbers[_FULL]

    def put(self, key: bytes, pieces: Sequence[bytes], answers: Sequence[Answer], took_ns: int, pixels: bytes) -> None:
        """Keep an image, where there is room."""
        numbers = self._numbers
        told = marshal.dumps((key, [len(piece) for piece in pieces], list(answers), took_ns))
        num_bytes = _HEAD.size + len(told) + sum(map(len, pieces)) + len(pixels)
        with self._alone(PATIENCE_S) as alone:
            place, end = numbers[_END], numbers[_END] + num_bytes
            looks = place // LOOK_EVERY_BYTES != end // LOOK_EVERY_BYTES
            if not alone or end > len(self._memory) or (looks and (free_memory_bytes() or 0) < LEAST_FREE_BYTES):
                numbers[_FULL] = 1
                return
            for part in (_HEAD.pack(num_bytes, len(told)), told, *pieces, pixels):
                self._memory[place : place + len(part)] = part
                place += len(part)
            numbers[_END] = end

    def look_through(self) -> None:
        """Find what was kept since the last look; processes that are forked from here know it then."""
        if self._seen == self._numbers[_END]:
            return
        with self._alone() as alone:
            while alone and self._seen < self._numbers[_END]:
                num_bytes, num_told = _HEAD.unpack_from(self._memory, self._seen)
                begin, end = self._seen + _HEAD.size, self._seen + num_bytes
                key, lengths, answers, took_ns = marshal.loads(self._memory[begin : begin + num_told])
                self._found.setdefault(key, Kept(lengths, answers, took_ns, begin + num_told, end))
                self._seen = end

    @contextlib.contextmanager
    def _alone(self, wait_s: float = 0.0) -> Iterator[bool]:
        """Whether no other process does the same."""
        alone = self._lock.acquire(timeout=wait_s)
        try:
            yield alone
        finally:
            if alone:
                self._lock.release()
