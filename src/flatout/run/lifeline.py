"""How does a child end with the parent that nobody could end it for? Linux only; elsewhere it goes on to its own end.

In: the parent's process id. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""Source: `prctl(2)`, Linux manual pages. A child of its own does not inherit it, and entering a user namespace
forgets it, so it is asked for in the process that it is for."""


def hold(parent_pid: int) -> None:
    """End this process when its parent ends; at once if that has ended already. Other processes are left alone.

    For runs that serve nobody but flatout: killed without notice, it cannot end them.
    """
    if os.getppid() == parent_pid:
        with contextlib.suppress(OSError, AttributeError):  # not Linux
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if not _lives(parent_pid):
        os._exit(1)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's to signal
        return True
    return True
