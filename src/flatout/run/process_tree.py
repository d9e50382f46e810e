"""What has a child started, and how is all of it ended? Its session, its descendants, and its mount namespace.

In: a process id. Out: nothing of it runs any more. A program that makes a session of its own, or a daemon that has
dropped its parent, is found as well: by its parents as long as they live, and in an isolated trial by the namespace
that nobody but the trial is in. Without isolation and without living parents nothing tells a daemon from one of the
user's own, and it is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 3.0
"""So long at most: who starts others meanwhile is looked for again, and a large process takes a while to end."""

PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One living process, its parent, and the session that it belongs to."""

    pid: int
    parent: int
    session: int


class ProcessTree:
    """All that one child has started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._namespace = -1
        """A descriptor: it keeps the kernel from giving the namespace's number to another one."""

    def look(self) -> None:
        """Note the child's namespace, once it has one of its own: after its end that cannot be known."""
        if self._namespace >= 0:
            return
        try:
            descriptor = os.open(f"/proc/{self._pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it has ended, or this system has no namespaces
            return
        if _mark(f"/proc/self/fd/{descriptor}") in (None, _mark("/proc/self/ns/mnt")):
            os.close(descriptor)
        else:
            self._namespace = descriptor

    def kill(self) -> None:
        """End all of it; nothing of the script runs any more, no handler either."""
        self.look()
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = self._found()  # before the first is killed: orphans do not say whose they were
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not found or time.monotonic() > deadline:
                return
            time.sleep(PAUSE_S)

    def close(self) -> None:
        """Let go of the namespace."""
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1

    def _found(self) -> set[int]:
        alive = living()
        found = {one.pid for one in alive if one.session == self._pid}
        family = {self._pid}
        while born := {one.pid for one in alive if one.parent in family} - family:
            family |= born
        found |= family & {one.pid for one in alive}
        if self._namespace >= 0:
            mark = _mark(f"/proc/self/fd/{self._namespace}")
            found |= {one.pid for one in alive if _mark(f"/proc/{one.pid}/ns/mnt") == mark}
        return found - {os.getpid()}


def living() -> list[Process]:
    """All living processes, from `/proc`; empty where there is no `/proc`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in ("Z", "X"):
            found.append(Process(pid=int(entry.name), parent=int(fields[1]), session=int(fields[3])))
    return found


def _mark(path: str) -> tuple[int, int] | None:
    """What tells one namespace from another; None where it cannot be seen."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino
