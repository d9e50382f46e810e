"""May a file that the user named be written over, and how does it get there whole?

In: a path, and how a file of that kind begins where flatout wrote it. Out: the file; or an error, for what else is
there is somebody's work, the training script perhaps.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import UsageError

HEAD_BYTES = 1024
"""In these a file says what wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """A kind of file that is written where the user says: what it is called, and what it begins with, or nearly so."""

    name: str
    mark: bytes
    nearly: bool = False


PAGE = FileKind(name="page", mark=b'<meta name="generator" content="flatout', nearly=True)
SUMMARY = FileKind(name="summary", mark=b'{"exit_code": ')


def check(path: Path, kind: FileKind, *, option: str) -> None:
    """Make sure that the file is new, empty, or an earlier one of its kind; pipes and devices have nothing to lose.

    Raises:
        UsageError: It is something else, or cannot be looked at.
    """
    typed = f"`{option} {path}`"
    if path.is_dir():
        raise UsageError(f"{typed} is a folder", cause="a file is written", hint="name a file in it")
    if not path.is_file():
        return
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as problem:
        raise UsageError(
            f"{typed} would overwrite a file that cannot be read",
            cause=str(problem.strerror or problem),
            hint="name another file",
        ) from None
    if head and not (kind.mark in head if kind.nearly else head.startswith(kind.mark)):
        raise UsageError(
            f"{typed} would overwrite a file that is no {kind.name}",
            cause=f"only an earlier {kind.name} of flatout is written over",
            hint="name another file",
        )


def write_whole(pieces: Iterable[str], path: Path) -> None:
    """Write a file whole or not at all: a draft beside it takes its place. A link stays a link.

    Raises:
        OSError: It cannot be written.
    """
    if path.exists() and not path.is_file():  # a pipe or a device, whose place nothing shall take
        with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.writelines(pieces)
        return
    place = Path(os.path.realpath(path))
    draft = place.with_name(f".{place.name}.{os.urandom(4).hex()}")
    try:
        with open(draft, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.writelines(pieces)
        if place.exists():
            draft.chmod(stat.S_IMODE(place.stat().st_mode))
        os.replace(draft, place)
    finally:
        draft.unlink(missing_ok=True)
