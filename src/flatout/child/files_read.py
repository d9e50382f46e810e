"""Which files of the user's does a run read? Listed in its process, for runs that later ones are held against.

In: the folders that are the user's. Out: the paths of what the script opened there for reading, and of the modules
that it has imported from wherever is not an installation. What code in C and worker processes open is not seen,
nor what is opened before the framework is imported, which is when we begin.

Imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Any

MOST = 500
"""Of a dataset of files the first so many."""

_WRITING = os.O_WRONLY | os.O_RDWR


class FilesRead:
    """What is opened from now on, by this process."""

    def __init__(self, folders: tuple[str, ...], without: tuple[str, ...]) -> None:
        """List files below `folders`, but none below one of `without`."""
        self._folders = tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)
        self._without = tuple(os.path.join(os.path.abspath(folder), "") for folder in (*without, *_installed()))
        self._read: dict[str, None] = {}
        self._written: set[str] = set()
        sys.addaudithook(self._see)  # it cannot be ended, as Python has it, so it has to be quick and never fail

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[2], int):
            return
        try:
            path = os.path.abspath(arguments[0])
            if not self._is_theirs(path):
                return
            if arguments[2] & _WRITING:
                self._written.add(path)
            elif len(self._read) < MOST:
                self._read[path] = None
        except Exception:  # noqa: BLE001  what an audit hook raises would refuse the script's own open()
            return

    def _is_theirs(self, path: str) -> bool:
        return path.startswith(self._folders) and not path.startswith(self._without) and not path.endswith(".pyc")

    def found(self) -> tuple[str, ...]:
        """What was read and not written as well, in the order in which it was first opened; then modules."""
        modules = dict.fromkeys(_file_of(module) for module in list(sys.modules.values()))
        own = [path for path in modules if path and not path.startswith(self._without) and os.path.isfile(path)]
        return tuple(dict.fromkeys([*(path for path in self._read if path not in self._written), *own]))


def _file_of(module: object) -> str:
    """Where a module's source lies; looked up without asking the module, which may import others to answer."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) else ""


def _installed() -> tuple[str, ...]:
    """Folders of Python, of installed packages and of flatout; what lies there has a version."""
    paths = sysconfig.get_paths()
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (*(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), ours)
