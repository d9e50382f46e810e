"""What of a plain script's doings is otherwise on a rank above 0? Folders that rank 0 makes, and what comes by stdin.

Such a rank sees what rank 0 writes, and may come a moment later: what that has just made it takes for made by itself.
What comes through a pipe or from a terminal can be read once, by rank 0; another rank that would read it refuses. In:
this process, from its first line on. Out: `os.mkdir` and `sys.stdin` of its own. Standard library only.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

from flatout.records.ranks import RankConfig, refuse


def share_folders(folder: str) -> None:
    """A folder that was made since the run began, of which `folder` is the own one, is made here as well, once."""
    plain, own, started_s = os.mkdir, set[str](), os.stat(os.path.join(folder, "ranks.json")).st_mtime

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        name = os.path.abspath(os.fsdecode(path)) if dir_fd is None else ""
        try:
            plain(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            if not name or name in own or not os.path.isdir(name) or os.stat(name).st_ctime < started_s:
                raise
        own.add(name)

    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        plain_rmdir(path, dir_fd=dir_fd)
        own.discard(os.path.abspath(os.fsdecode(path)) if dir_fd is None else "")

    plain_rmdir = os.rmdir
    os.mkdir, os.rmdir = mkdir, rmdir  # type: ignore[assignment]


def refuse_stdin(folder: str, rank: int, world: int) -> None:
    """`sys.stdin`, and so `input`, refuse to be read."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(_Refusing(folder, rank, world)))  # type: ignore[misc]


class _Refusing(io.RawIOBase):
    def __init__(self, folder: str, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._terms = rank, RankConfig(num_ranks=world, folder=folder)

    def readable(self) -> bool:
        return True

    def readinto(self, _: Any) -> NoReturn:
        refuse(
            self._terms, self._rank, "the script reads from stdin, which comes through a pipe or from a terminal",
            cause="it can be read once, and every rank runs the whole script",
            hint="give it as a file (`< answers.txt`) or as an argument; or run it without `--ranks`",
        )  # fmt: skip
