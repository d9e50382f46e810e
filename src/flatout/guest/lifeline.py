"""How does a child end with its parent, even one that is killed without notice? Linux only; elsewhere it goes on.

In: the parent's process id. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Source: `prctl(2)`, Linux manual pages. A child of its own does not inherit it, and entering a user namespace
forgets it, so it is asked for in the process that it is for."""


def request() -> Callable[[], None]:
    """What asks the kernel to end the calling process when the thread that started it ends; made before a fork."""
    try:
        control = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not on Linux
        return lambda: None
    return lambda: control(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def hold(parent_pid: int) -> None:
    """End this process when its parent ends; at once if that has ended already. Other processes are left alone.

    For runs that serve nobody but flatout: killed without notice, it cannot end them.
    """
    is_ours = os.getppid() == parent_pid
    if is_ours:
        request()()
    if os.getppid() != parent_pid if is_ours else not _lives(parent_pid):
        os._exit(1)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that was killed just now is there for a moment after its children have lost it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's to signal
        pass
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # no Linux, or it has ended just now
        return not Path("/proc/self/stat").exists()
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
