"""Which of the processes that a script starts is the one that is recorded? The first one that makes a step.

In: the claim's path in the run folder. Out: whether it is ours. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path


def claim(path: str, pid: int, *, again: bool) -> bool:
    """Whether this process is the one that is recorded; the file says who is.

    Args:
        path: The claim.
        pid: This process.
        again: Whether the claim of a process that has ended may be taken over, for scripts that train in one process
            after the other.

    Raises:
        OSError: The folder is gone or cannot be written.
    """
    number = 1
    while True:
        place = path if number == 1 else f"{path}.{number}"
        try:
            descriptor = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if not again or _runs(place):
                return False
            number += 1
            continue
        try:
            os.write(descriptor, str(pid).encode())
        finally:
            os.close(descriptor)
        return True


def _runs(place: str) -> bool:
    text = Path(place).read_text(encoding="ascii", errors="replace")
    if not text.isdecimal():  # claimed this very moment
        return True
    try:
        os.kill(int(text), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
