"""Which folders has rank 0 made? To another rank that makes one of them they are as if they were not there yet.

Ranks above 0 see what rank 0 writes, and may come a moment later: `os.mkdir("epoch-3")` raised `FileExistsError` there.
So the first rank of a machine notes each folder that it makes, and the others take the same call for done. In:
`os.mkdir`, which `os.makedirs` and `pathlib` call as well. Out: one that stands in its place. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from typing import Any

WAIT_S = 0.2
"""So long rank 0 may take from making a folder to noting it."""


def note(place: str) -> None:
    """Note in a file what this process makes."""
    plain = os.mkdir

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        plain(path, mode, dir_fd=dir_fd)
        if dir_fd is None:
            with contextlib.suppress(OSError), open(place, "ab") as file:
                file.write(os.fsencode(os.path.abspath(path)) + b"\0")

    os.mkdir = mkdir  # type: ignore[assignment]


def take_for_done(place: str) -> None:
    """Let this process make what the first rank has noted in a file, as often as that has."""
    plain, own, started_s = os.mkdir, Counter[bytes](), time.time()

    def is_noted(path: bytes) -> bool:
        """Whether the first rank has made it, or says so in a moment, where it is new."""
        until_s = time.monotonic() + WAIT_S
        while True:
            if _noted(place)[path] > own[path]:
                return True
            if time.monotonic() > until_s or os.stat(path).st_ctime < started_s - WAIT_S:
                return False
            time.sleep(0.01)

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        name = os.fsencode(os.path.abspath(path)) if dir_fd is None else b""
        try:
            plain(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            if not name or not is_noted(name):
                raise
        own[name] += 1

    os.mkdir = mkdir  # type: ignore[assignment]


def _noted(place: str) -> Counter[bytes]:
    with contextlib.suppress(OSError), open(place, "rb") as file:
        return Counter(file.read().split(b"\0"))
    return Counter()
