"""What does a rank above 0 read from stdin? What rank 0 has read, as soon as it has.

What comes through a pipe or from a terminal can be read once. So the first rank of a machine keeps what its Python code
reads, and the others read that, from its beginning whenever they begin anew, and wait where they are ahead of it. In:
this process, from its first line on, and the file where that is kept. Out: another `sys.stdin`. Standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

from flatout.ranks import ended_file

WAIT_S = 0.005
"""So often it is looked for more by a rank that is ahead."""


def keep(place: str) -> None:
    """Keep what this process, the first rank of its machine, reads from stdin."""
    source = _Source(place)
    _replace_stdin(source)
    if os.isatty(0):
        _keep_lines_of_a_terminal(source)


def follow(place: str, leader: int) -> None:
    """Read in this process what the first rank, `leader`, reads."""
    _replace_stdin(_Followed(place, leader))


def _mark_of_end(place: str) -> Path:
    return Path(f"{place}-ended")


class _Stdin(io.RawIOBase):
    """As the raw stream beneath `sys.stdin`."""

    name = "<stdin>"
    mode = "rb"

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return os.isatty(0)


class _Source(_Stdin):
    def __init__(self, place: str) -> None:
        self._place = place
        self.num_kept = 0
        """Bytes."""

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        found = os.read(0, len(buffer))
        self.keep(found)
        buffer[: len(found)] = found
        return len(found)

    def keep(self, found: bytes) -> None:
        """For the other ranks; nothing is the end."""
        self.num_kept += len(found)
        with contextlib.suppress(OSError):  # a full disk: they wait until they are said to hang, and this one goes on
            if not found:
                _mark_of_end(self._place).touch()
                return
            with open(self._place, "ab") as file:
                file.write(found)


class _Followed(_Stdin):
    def __init__(self, place: str, leader: int) -> None:
        self._ends = (_mark_of_end(place), ended_file(Path(place).parent, leader))

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while True:
            ended = any(mark.exists() for mark in self._ends)  # looked at first: what was read before is there
            found = os.read(0, len(buffer))
            if found or ended:
                buffer[: len(found)] = found
                return len(found)
            time.sleep(WAIT_S)


def _replace_stdin(raw: _Stdin) -> None:
    plain: Any = sys.stdin
    stdin: Any = io.TextIOWrapper(
        io.BufferedReader(raw, getattr(plain.buffer.raw, "_blksize", io.DEFAULT_BUFFER_SIZE)),
        encoding=plain.encoding,
        errors=plain.errors,
        newline="\n",
        line_buffering=plain.line_buffering,
    )
    stdin.mode = "r"
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def _keep_lines_of_a_terminal(source: _Source) -> None:
    """`input` reads a terminal past `sys.stdin`, to let its line be edited."""
    plain = builtins.input

    def input(prompt: object = "", /) -> str:
        num_before = source.num_kept
        try:
            line = plain(prompt)
        except EOFError:
            source.keep(b"")
            raise
        if source.num_kept == num_before:
            source.keep(f"{line}\n".encode(sys.stdin.encoding, sys.stdin.errors or "strict"))
        return line

    builtins.input = input
