"""What does a rank above 0 do while rank 0 sets up? Nothing twice: it begins anew where rank 0 had better go first.

Before training, a rank that is about to connect to somewhere, or to read a file that rank 0 has made meanwhile, ends;
once rank 0 trains it is started again, and finds everything there (`enter_rank.py`). Nothing of it has had an effect by
then. So a data set is downloaded once, and nobody reads half a file. In: this process, from its first line on. Out: its
end with `EXIT_ANEW`, where that is called for. Standard library only.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

from flatout.records.ranks import EXIT_ANEW, anew_file, leave, trains_file

SLACK_S = 0.01
"""Clocks of files are coarse."""


def arm(folder: str, rank: int, local: int, port: int) -> None:
    """Watch over this process until it trains, or until rank 0 does (on another machine its first rank)."""
    setup = _Setup(Path(folder), rank, rank - local, port)
    if not setup.is_over():
        sys.addaudithook(setup.audit)
    former = sys.excepthook

    def excepthook(kind: type[BaseException], problem: BaseException, traceback: Any) -> None:
        if isinstance(problem, FileExistsError) and isinstance(problem.filename, str):
            setup.note_anew({"hide": [os.path.abspath(problem.filename)]})
        former(kind, problem, traceback)

    sys.excepthook = excepthook


class _Setup:
    def __init__(self, folder: Path, rank: int, leader: int, port: int) -> None:
        self._folder, self._rank, self._leader, self._port = folder, rank, leader, port
        self._own: set[str] = set()
        """Files that this process has written."""
        self._started_s = time.time() - SLACK_S
        self._is_over = False
        self._pid = os.getpid()

    def is_over(self) -> bool:
        """Whether rank 0 trains, or this rank does."""
        if not self._is_over:
            self._is_over = any(trains_file(self._folder, rank).exists() for rank in (self._leader, self._rank))
        return self._is_over

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called for each event; most are none of ours."""
        if event not in ("open", "socket.connect") or self._is_over or os.getpid() != self._pid:
            return
        try:
            wanted = (
                self._connects(arguments) if event == "socket.connect" else self._reads_what_is_being_made(arguments)
            )
        except Exception:  # noqa: BLE001  what an audit hook raises would refuse what the script does
            return
        if wanted and not self.is_over():
            self.note_anew({"hide": []})
            leave(EXIT_ANEW)

    def note_anew(self, found: dict[str, Any]) -> None:
        """What is to be different when this rank begins anew."""
        try:
            anew_file(self._folder, self._rank).write_text(json.dumps(found), encoding="utf-8")
        except OSError:
            return

    def _connects(self, arguments: tuple[Any, ...]) -> bool:
        """To another machine, or to a server here that is not the ranks' own meeting point."""
        address = arguments[1]
        return isinstance(address, tuple) and len(address) >= 2 and address[1] != self._port

    def _reads_what_is_being_made(self, arguments: tuple[Any, ...]) -> bool:
        path, _, flags = arguments
        if not isinstance(path, str | bytes) or not isinstance(flags, int):
            return False
        name = os.path.abspath(os.fsdecode(path))
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._own.add(name)
            return False
        if (
            name in self._own
            or name.startswith((str(self._folder), "/proc/", "/dev/", "/sys/"))
            or "__pycache__" in name
            or name.endswith(".pyc")  # of a `PYTHONPYCACHEPREFIX`
        ):
            return False
        seen = os.stat(name)
        return stat.S_ISREG(seen.st_mode) and seen.st_ctime > self._started_s
