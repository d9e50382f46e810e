"""Do runs that are to be judged together rest on the same files?

In: what runs read, by path. Out: marks that differ where contents do, and the names of what differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flatout.errors import ScriptError
from flatout.report import words

LARGE_BYTES = 4_000_000
"""A larger file, which is data, is known by its size and when it was written; reading it would take a while."""

NAMED = 3
"""So many names are said."""


def marks(paths: Iterable[str]) -> dict[str, str]:
    """A mark of each file's content; an empty one where it cannot be read."""
    return {path: _mark(path) for path in paths}


def _mark(path: str) -> str:
    try:
        status = os.stat(path)
        if status.st_size > LARGE_BYTES:
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def edited_since(paths: Iterable[str], unix_s: float) -> list[str]:
    """Files that were written after a moment."""
    return [path for path in paths if os.path.exists(path) and os.stat(path).st_mtime > unix_s]


def differing(seen: Iterable[Mapping[str, str]]) -> list[str]:
    """Files that have two marks."""
    first: dict[str, str] = {}
    return list(dict.fromkeys(p for one in seen for p, mark in one.items() if first.setdefault(p, mark) != mark))


def changed(script: str, paths: Sequence[str]) -> ScriptError:
    """Runs before and after an edit are of two scripts: nothing is to be concluded from their difference.

    Without paths it is the script itself that was edited, or what it imports from beside it.
    """
    read = f"it reads {named(paths)}, which {'was' if len(paths) == 1 else 'were'} edited meanwhile"
    return ScriptError(
        f"`{script}` changed while it was being proved",
        cause=read if paths else "its file, or one that it imports from beside it, was edited meanwhile",
        hint="the same command begins anew with the files as they are now; put back, it goes on where it was",
    )


def named(paths: Sequence[str]) -> str:
    """The first of some paths, as they are said.

    >>> named(["a.json", "b.json", "c.json", "d.json"])
    '`a.json`, `b.json`, `c.json` and 1 more'
    """
    shown = ", ".join(f"`{words.nearby(Path(path))}`" for path in paths[:NAMED])
    return shown + (f" and {len(paths) - NAMED} more" if len(paths) > NAMED else "")
