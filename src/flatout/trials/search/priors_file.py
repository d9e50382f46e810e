"""Where is kept what earlier tunings found? A small file for each, in flatout's folder of the user's caches.

In: a `Tuning`, or nothing. Out: its file, or the latest tunings; files that are torn or not ours are left alone. A file
for each, so that several tunings that end at once do not wait for one another, and a torn one costs one tuning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import MachineError, RecordError
from flatout.records.as_json import from_json, to_json
from flatout.records.places import cache_folder
from flatout.trials.search.priors import Tuning, fault

MOST_TUNINGS = 200
"""The latest that are kept; older ones make room."""

MOST_BYTES = 256 * 1024
"""Of one file; some hundred sets of levers take a tenth of it."""

_NAME = re.compile(r"\d{20}-[0-9a-f]{8}\.json")
_HALF = re.compile(r"\d{20}-[0-9a-f]{8}\.json\.new")

HALF_S = 3600.0
"""A file that is still half written after so long will not be finished: whoever wrote it was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is there of earlier tunings.

    Attributes:
        tunings: The latest, the very latest last.
        num_unreadable: Files of ours that could not be read.
        folder: Where they lie; None where there is no home.
        size_bytes: What they take.
    """

    tunings: tuple[Tuning, ...] = ()
    num_unreadable: int = 0
    folder: Path | None = None
    size_bytes: int = 0

    @property
    def num_files(self) -> int:
        """How many files there are."""
        return len(self.tunings) + self.num_unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What was removed.

    Attributes:
        num_tunings: How many.
        folder: From where; None where there is no home.
    """

    num_tunings: int
    folder: str | None


def priors_folder() -> Path | None:
    """Where what earlier tunings found lies; None where there is no home."""
    folder = cache_folder()
    return None if folder is None else folder / "priors"


def kept_priors() -> Kept:
    """What is there; nothing that lies in the folder makes it fail."""
    folder = priors_folder()
    if folder is None:
        return Kept()
    found: list[Tuning] = []
    num_unreadable = size_bytes = 0
    for path in _paths(folder)[-MOST_TUNINGS:]:
        try:
            text = _text(path)
            found.append(_tuning(text, path))
            size_bytes += len(text)
        except FileNotFoundError:  # another tuning made room
            continue
        except (OSError, ValueError, RecursionError, RecordError):
            num_unreadable += 1
    return Kept(tunings=tuple(found), num_unreadable=num_unreadable, folder=folder, size_bytes=size_bytes)


def keep(tuning: Tuning) -> str:
    """Write a tuning at once or not at all, and make room; why it could not be written, or an empty text."""
    folder = priors_folder()
    if folder is None:
        return "there is no home"
    path = folder / f"{time.time_ns():020d}-{os.urandom(4).hex()}.json"
    half = path.with_name(f"{path.name}.new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_json(tuning), allow_nan=False)
        if len(text) > MOST_BYTES:
            return "it is too long"
        half.write_text(text, encoding="utf-8")
        os.replace(half, path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        return f"`{folder}`: {problem.strerror or problem}"
    _make_room(folder)
    return ""


def forget_priors() -> Forgotten:
    """Remove what earlier tunings found, and nothing else that lies there.

    Raises:
        MachineError: It cannot be removed.
    """
    folder = priors_folder()
    num = 0
    for path in [*_paths(folder), *_halves(folder)] if folder is not None else ():
        try:
            path.unlink(missing_ok=True)
        except OSError as problem:
            raise MachineError(
                f"cannot remove `{path}`", cause=str(problem.strerror or problem), hint="look at its folder"
            ) from None
        num += bool(_NAME.fullmatch(path.name))
    if folder is not None:
        with contextlib.suppress(OSError):  # it is not there, or other files lie in it
            folder.rmdir()
    return Forgotten(num_tunings=num, folder=None if folder is None else str(folder))


def _paths(folder: Path) -> list[Path]:
    """The files of ours, the oldest first; none where the folder cannot be read."""
    return _named(folder, _NAME)


def _halves(folder: Path) -> list[Path]:
    return _named(folder, _HALF)


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except OSError:
        return []


def _make_room(folder: Path) -> None:
    """Remove the oldest beyond `MOST_TUNINGS`, and what killed tunings left half written; others may do so as well."""
    for path in _paths(folder)[:-MOST_TUNINGS]:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for path in _halves(folder):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > HALF_S:
                path.unlink(missing_ok=True)


def _text(path: Path) -> str:
    """What stands in a file; a pipe is not waited for, and no more is read than a tuning can have.

    Raises:
        OSError: It is no plain file, or cannot be read.
        ValueError: It is too long, or not UTF-8.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("no plain file")
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError("too long")
    return content.decode("utf-8")


def _tuning(text: str, path: Path) -> Tuning:
    """The tuning that a file describes.

    Raises:
        RecordError: It describes none.
    """
    found = from_json(Tuning, json.loads(text), where=f"`{path}`")
    if problem := fault(found):
        raise RecordError(f"`{path}` is torn", cause=problem, hint="`flatout machine --forget-priors`")
    return found
