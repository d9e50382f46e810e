"""Where do the records of a run lie? In a folder of its own under `.flatout/`, which git ignores.

In: the working folder and a name. Out: a fresh run folder, or an error that says why none can be made.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flatout.errors import MachineError, RecordError, UsageError, cannot_write

ROOT = ".flatout"
KEPT_RUNS = 20
"""Records of runs (`flatout run`) that are kept for each script; what `tune` and `why` found is kept for good."""

KEPT_S = 24 * 3600.0
"""No record younger than this is removed."""

_RESULTS = ("result.json", "proof.json", "rank-anatomy.json")
"""What `tune` and `why`, `prove` and `why --ranks` write when they are done."""

NEEDED_BYTES = 65536
"""What a run folder must be able to hold for a run to be worth recording."""


def working_folder() -> Path:
    """The folder in which the command was typed.

    Raises:
        MachineError: It was removed meanwhile.
    """
    try:
        return Path.cwd()
    except OSError as problem:
        cause = str(problem.strerror or problem)
        raise MachineError("the working folder is gone", cause=cause, hint="`cd` to one that exists") from None


def root(folder: Path) -> Path:
    """`.flatout/` in `folder`, made with a `.gitignore` of its own.

    Raises:
        MachineError: The folder cannot be written.
    """
    place = folder / ROOT
    try:
        place.mkdir(exist_ok=True)
        ignore = place / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as problem:
        raise cannot_write(place, problem) from None
    return place


def new(folder: Path, stem: str) -> Path:
    """The next free `.flatout/<stem>-<n>`, made so that two processes never get the same."""
    place = root(folder)
    number = 1 + max((_number(path, stem) for path in place.glob(f"{glob.escape(stem)}-*")), default=0)
    while True:
        path = place / f"{stem}-{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        except OSError as problem:
            raise cannot_write(path, problem) from None
        return path


@contextmanager
def for_run(stem: str) -> Iterator[tuple[Path | None, MachineError | None]]:
    """A folder for the records of a run that takes place anyway, and why they cannot be kept.

    Where the working folder cannot be written a temporary one serves, and is removed in the end; None where not even
    that can be had.
    """
    problem: MachineError | None = None
    with ExitStack() as stack:
        place: Path | None
        try:
            place = new(Path.cwd(), stem)
            _try(place)
            prune(place.parent, stem)
        except (OSError, MachineError) as failure:  # an `OSError` where the working folder is gone
            problem = failure if isinstance(failure, MachineError) else cannot_write(ROOT, failure)
            try:
                temporary = tempfile.TemporaryDirectory(prefix="flatout-", ignore_cleanup_errors=True)
                place = Path(stack.enter_context(temporary))
                _try(place)
            except (OSError, MachineError):
                place = None
        yield place, problem


def _try(place: Path) -> None:
    """Make sure that something can be written in a folder; leave nothing in one that is full."""
    probe = place / "probe"
    try:
        probe.write_bytes(bytes(NEEDED_BYTES))
    except OSError as problem:
        shutil.rmtree(place, ignore_errors=True)
        raise cannot_write(place, problem) from None
    probe.unlink()


@contextmanager
def claimed(folder: Path, stem: str, former: Path | None = None) -> Iterator[Path]:
    """A fresh run folder, or a former one again, for as long as nobody else measures in this working folder.

    Two measurements at once would each see the other as a disturbance.

    Raises:
        UsageError: Another one is at it.
        MachineError: The folder cannot be written, or the disk is full.
    """
    place = root(folder)
    try:
        lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as problem:
        raise cannot_write(place / "lock", problem) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(lock, 32).decode(errors="replace").strip() or "another process"
            raise UsageError(
                f"another flatout is measuring in `{folder}` (process {pid})",
                cause="two measurements at once would disturb each other",
                hint="wait for it, or stop it",
            ) from None
        try:
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        except OSError as problem:  # a file of no bytes needs no room, these do
            raise cannot_write(place / "lock", problem) from None
        _clear_after_killed(place)
        run_folder = former or new(folder, stem)
        _try(run_folder)
        yield run_folder
    finally:
        os.close(lock)


def _clear_after_killed(place: Path) -> None:
    """Remove what measurements that were killed without notice have left: nobody measures here now.

    What their trials wrote may be large, and can be shown to nobody. A proof keeps the runs that it has finished.
    """
    from flatout.run import isolation  # a run has no use for it, and waits for each import

    for scratch in (*place.glob("*/scratch-*"), *place.glob("*/sample-*/scratch*")):
        with suppress(MachineError):
            isolation.discard(scratch)
            if not is_kept(scratch.parent):
                shutil.rmtree(scratch.parent, ignore_errors=True)


def prune(place: Path, stem: str) -> None:
    """Remove the oldest records of runs of a script, so that a script that runs every night does not fill the disk."""
    folders = [p for p in place.glob(f"{glob.escape(stem)}-*") if _number(p, stem) and not is_kept(p)]
    for path in sorted(folders, key=lambda p: -_number(p, stem))[KEPT_RUNS:]:
        try:
            if time.time() - max(p.stat().st_mtime for p in (path, *path.iterdir())) > KEPT_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # somebody else is removing it
            continue


def is_kept(path: Path) -> bool:
    """Whether a run folder holds what took long to find out, and is kept until its user removes it."""
    return any((path / name).exists() for name in ("runs.jsonl", *_RESULTS))


def _number(path: Path, stem: str) -> int:
    tail = path.name[len(stem) + 1 :]
    return int(tail) if tail.isdecimal() else 0


def find(folder: Path, name: str | None) -> Path:
    """The run folder that `name` means: a path, a name under `.flatout/`, or without a name the newest.

    Raises:
        UsageError: There is none.
        RecordError: It holds no finished record.
    """
    if name is not None:
        for path in (Path(name), folder / ROOT / name):
            if path.is_dir():
                return path
            if path.is_file():
                return path.parent
        raise UsageError(
            f"no such run: `{name}`", cause="neither a folder nor a name under `.flatout/`", hint="`ls .flatout`"
        )
    place = folder / ROOT
    folders = [p for p in place.glob("*-*") if p.is_dir()] if place.is_dir() else []
    runs = [p for p in folders if _finished(p) is not None]
    if not runs:
        raise RecordError(
            f"no result in `{place}`",
            cause="its folders hold records of runs, and of what was not measured to the end"
            if folders
            else "nothing was measured in this folder yet",
            hint="`flatout tune SCRIPT` or `flatout why SCRIPT` first",
        )
    return max(runs, key=lambda p: _finished(p) or 0.0)


def _finished(path: Path) -> float | None:
    """When what was found was written there; None where nothing was."""
    return next(((path / name).stat().st_mtime for name in _RESULTS if (path / name).exists()), None)
