"""How does this process end as the script ended? In: its exit code or signal. Out: nobody can tell the difference."""

from __future__ import annotations

import os
import signal
import sys


def leave_as(exit_code: int) -> None:
    """End this process as the script ended: with its exit code, or by the same signal."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            continue
    if exit_code < 0:
        _die_of(-exit_code)
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


def _die_of(number: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the script left one
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
