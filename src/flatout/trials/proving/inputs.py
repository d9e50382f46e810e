"""Do runs that are to be judged together rest on the same files and the same environment?

In: what runs read, by path, and the variables that they saw. Out: marks that differ where contents do, and the names of
what differs between runs, or between runs and now.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flatout.errors import ScriptError
from flatout.judge.proof import WholeRun
from flatout.report import words

LARGE_BYTES = 4_000_000
"""A larger file, which is data, is known by its size and when it was written; reading it would take a while."""

NAMED = 3
"""So many names are said."""

_OF_THE_TERMINAL = (
    "PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLORTERM", "COLUMNS", "LINES", "DISPLAY", "WAYLAND_", "WINDOW", "SSH_",
    "XDG_", "DBUS_", "TMUX", "STY", "VSCODE_", "VTE_", "HIST", "PS1", "PROMPT", "LS_COLORS", "GPG_", "ITERM_", "KITTY_",
)  # fmt: skip
"""What variables begin with that differ from one terminal to the next, and say nothing to a training."""


def marks(paths: Iterable[str]) -> dict[str, str]:
    """A mark of each file that is there."""
    return {path: mark for path in paths if (mark := _mark(path))}


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
    found = []
    for path in paths:
        try:
            if os.stat(path).st_mtime > unix_s:
                found.append(path)
        except OSError:
            continue
    return found


def environment() -> dict[str, str]:
    """A mark of each variable: so short that it does not tell what is in it."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_TERMINAL)}
    return {n: hashlib.sha256(v.encode("utf-8", "surrogateescape")).hexdigest()[:4] for n, v in known.items()}


def changed_files(runs: Sequence[WholeRun], *, since: bool) -> list[str]:
    """Files of which two runs, or with `since` a run and now, had different contents."""
    return _differing([run.inputs for run in runs], marks({p for run in runs for p in run.inputs}) if since else None)


def changed_variables(runs: Sequence[WholeRun], now: Mapping[str, str]) -> list[str]:
    """Names of variables that are not now what they were in some run."""
    seen = [run.environment for run in runs if run.environment]
    names = {name for one in (*seen, now) for name in one}
    return sorted(name for name in names if any(one.get(name) != now.get(name) for one in seen))


def _differing(seen: Sequence[Mapping[str, str]], now: Mapping[str, str] | None) -> list[str]:
    reference: dict[str, str] = {}
    found: dict[str, None] = {}
    for one in seen:
        for path, mark in one.items():
            if reference.setdefault(path, mark) != mark or (now is not None and now.get(path) != mark):
                found[path] = None
    return list(found)


def changed(script: str, paths: Sequence[str] = ()) -> ScriptError:
    """Runs before and after an edit are of two scripts: nothing is to be concluded from their difference.

    Args:
        script: Its name.
        paths: What was edited; without any it is the script, or what it imports from beside it.
    """
    edited = "it, or a file beside it that it imports, was edited meanwhile"
    if paths:
        edited = f"it reads {named(paths)}, which {'was' if len(paths) == 1 else 'were'} edited meanwhile"
    return ScriptError(
        f"`{script}` changed while it was being proved",
        cause=edited,
        hint="the same command begins anew with the files as they are now; put back, it goes on where it was",
    )


def named(names: Sequence[str]) -> str:
    """The first of some names, as they are said.

    >>> named(["LR", "SEED", "A", "B"])
    '`LR`, `SEED`, `A` and 1 more'
    """
    shown = ", ".join(f"`{words.nearby(Path(name))}`" for name in names[:NAMED])
    return shown + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
