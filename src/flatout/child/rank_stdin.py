"""How do ranks above 0 get what rank 0 reads from stdin? It is kept in a file, and passed on by `enter_rank.py`.

What comes through a pipe or from a terminal can be read once. So the first rank of a machine keeps what its Python code
reads; the others get that through a pipe, from its beginning whenever they begin anew. In: this process, from its first
line on, and the file where that is kept. Out: another `sys.stdin`. Standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any


def keep(place: str) -> None:
    """Keep what this process, the first rank of its machine, reads from stdin."""
    source = _Source(place)
    _replace_stdin(source)
    if os.isatty(0):
        _keep_lines_of_a_terminal(source)


class _Source(io.RawIOBase):
    """As the raw stream beneath `sys.stdin`; what is read from it is kept."""

    name = "<stdin>"
    mode = "rb"
    closefd = False

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place
        self.num_kept = 0
        """Bytes."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return os.isatty(0)

    def readinto(self, buffer: bytearray | memoryview) -> int | None:  # type: ignore[override]
        try:
            found = os.read(0, len(buffer))
        except BlockingIOError:  # the script has asked not to wait
            return None
        self.keep(found)
        buffer[: len(found)] = found
        return len(found)

    def keep(self, found: bytes) -> None:
        """For the other ranks; nothing is the end."""
        self.num_kept += len(found)
        with contextlib.suppress(OSError):  # a full disk: they wait until they are said to hang
            if not found:
                Path(f"{self._place}-ended").touch()
                return
            with open(self._place, "ab") as file:
                file.write(found)


def _replace_stdin(raw: _Source) -> None:
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
