"""Which stores are kept on the disk, and how is one removed?

Each lies in a folder of its own, which bears its name. A folder that holds no file of ours is none. In: the folder of
all stores, names. Out: what there is, what was removed.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.errors import MachineError, UsageError, did_you_mean
from flatout.records.places import cache_folder
from flatout.records.store_state import FILE, LOCK, OURS, BusyError, Lock, State, TornError, free_bytes, is_held, read

LEVER = "sample_store"
"""The lever whose items they are."""

DAY_S = 24 * 3600.0

_ROWS = re.compile(r"[0-9a-f]{8}-(items|made-\d+|column-\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStore:
    """One store on the disk.

    Attributes:
        name: That of its folder.
        script: The script that made it; empty where that is not known.
        dataset: The class of its dataset; likewise.
        num_kept: Items that are kept; None where the store is torn.
        num_items: Items of the dataset; likewise.
        size_bytes: What it takes on the disk.
        used_unix_s: When a run last opened it.
        state: `whole`, `partial` (not all items are kept), or why a run would make it anew.
        in_use: Whether a run uses it now.
    """

    name: str
    script: str
    dataset: str
    num_kept: int | None
    num_items: int | None
    size_bytes: int
    used_unix_s: float
    state: str
    in_use: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What became of the stores that were to be removed.

    Attributes:
        names: Those that are gone.
        freed_bytes: What they took.
        in_use: Those that a run uses.
        others: Those whose folder holds files that are none of ours, and therefore stays.
    """

    names: tuple[str, ...] = ()
    freed_bytes: int = 0
    in_use: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def stores_folder() -> Path | None:
    """Where all stores lie; None where there is no home."""
    folder = cache_folder()
    return None if folder is None else folder / "stores"


def paths(folder: Path) -> list[Path]:
    """The folders of the stores that lie in `folder`, by name; none where it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and _ours(path))
    except OSError:
        return []


def _ours(path: Path) -> list[Path]:
    """The files of ours in a folder; none where it cannot be read."""
    try:
        return [one for one in path.iterdir() if one.name in OURS or _ROWS.fullmatch(one.name)]
    except OSError:
        return []


def listed(folder: Path) -> list[KeptStore]:
    """The stores in `folder`, the one that was used last first."""
    return sorted(map(_seen, paths(folder)), key=lambda one: -one.used_unix_s)


def _seen(path: Path) -> KeptStore:
    state: State | None = None
    try:
        state = read(path)
        whole = state.num_rows >= state.num_items
        said = "whole" if whole else "partial"
        if any(not _is_whole(state.file(path, part), part.row_bytes * state.capacity) for part in state.parts):
            said = "torn: rows are missing"
    except TornError as problem:
        said = str(problem).replace("its state is torn", "torn").replace("it is of", "of")
    except FileNotFoundError:
        said = "torn"
    except OSError as problem:
        said = f"unreadable: {problem.strerror or problem}"
    return KeptStore(
        name=path.name,
        script=state.script if state else "",
        dataset=state.dataset if state else "",
        num_kept=state.num_rows if state else None,
        num_items=state.num_items if state else None,
        size_bytes=sum(map(_size_bytes, _ours(path))),
        used_unix_s=max(_modified_unix_s(path / LOCK), _modified_unix_s(path / FILE)),
        state=said,
        in_use=is_held(path / LOCK),
    )


def _is_whole(path: Path, size_bytes: int) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size >= size_bytes
    return False


def _size_bytes(path: Path) -> int:
    """What a file takes on the disk: where nothing was written yet, it takes nothing."""
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


def _modified_unix_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def stores() -> list[KeptStore]:
    """The stores on the disk, the one that was used last first."""
    place = stores_folder()
    return [] if place is None else listed(place)


def remove_stores(names: Collection[str] | None, *, older_than_days: float | None = None) -> Removed:
    """Remove stores from the disk; one that is in use stays.

    Args:
        names: Which; None for all.
        older_than_days: Only those that no run has used for so long.

    Raises:
        UsageError: There is no store of that name.
        MachineError: One cannot be removed.
    """
    there = {one.name: one for one in stores()}
    for name in names or ():
        if name not in there:
            raise _unknown(name, list(there))
    found, place = Removed(), stores_folder()
    before_unix_s = None if older_than_days is None else time.time() - older_than_days * DAY_S
    for name in dict.fromkeys(there if names is None else names):
        if place is not None and (before_unix_s is None or there[name].used_unix_s < before_unix_s):
            found = _without(found, place / name)
    return found


def adopted(source: Path, target: Path) -> list[str]:
    """Move the stores in one folder to another, where they take the place of those of their names; a line for each."""
    there = {tuple(sorted(state.marks.items())): state for path in paths(target) if (state := _state(path)) is not None}
    lines = []
    for path in paths(source):
        state = _state(path)
        if state is None or not state.num_rows:
            continue
        former = there.get(tuple(sorted(state.marks.items())))
        if former is None or former.num_rows < state.num_rows:
            said = f"{state.num_rows:,} of {state.num_items:,} items"
            why_not = _moved(path, target / path.name)
            lines.append(
                f"store `{path.name}` is not kept: {why_not}"
                if why_not
                else f"store `{path.name}` is kept for later runs: {said}"
            )
    return lines


def _state(path: Path) -> State | None:
    with contextlib.suppress(OSError, TornError):
        return read(path)
    return None


def _moved(path: Path, place: Path) -> str | None:
    """Move a store; why it could not be, where it could not."""
    new = place.with_name(f"{place.name}.new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.stat().st_dev != place.parent.stat().st_dev:
            if sum(map(_size_bytes, _ours(path))) > free_bytes(place.parent):
                return "the disk has no room"
            shutil.copytree(path, new, dirs_exist_ok=True)
            path = new
        if place.exists() and _without(Removed(), place).in_use:
            return "a run uses the store in its place"
        path.rename(place)
    except OSError as problem:
        return str(problem.strerror or problem)
    except MachineError as problem:
        return problem.cause
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return None


def _unknown(name: str, there: list[str]) -> UsageError:
    return UsageError(
        f"no such store: `{name}`",
        cause="stores are " + ", ".join(f"`{one}`" for one in there) if there else "no store is kept",
        hint=did_you_mean(name, there, "`flatout store ls` lists them"),
    )


def _without(found: Removed, path: Path) -> Removed:
    """What was removed so far, and this one."""
    size_bytes = sum(map(_size_bytes, _ours(path)))
    try:
        lock = Lock(path / LOCK, alone=True)
        try:
            for one in sorted(_ours(path), key=lambda one: (one.name != FILE, one.name == LOCK)):
                one.unlink(missing_ok=True)  # the state first: what is half removed is torn
        finally:
            lock.release()
    except BusyError:
        return replace(found, in_use=(*found.in_use, path.name))
    except OSError as problem:
        raise MachineError(
            f"cannot remove `{path}`",
            cause=str(problem.strerror or problem),
            hint="whoever may write to that folder can remove it",
        ) from None
    found = replace(found, names=(*found.names, path.name), freed_bytes=found.freed_bytes + size_bytes)
    try:
        path.rmdir()
    except OSError:
        found = replace(found, others=(*found.others, path.name))
    return found
