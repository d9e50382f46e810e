"""Where was a tensor's value read on the host, and what did that take? Records of one window, by line and kind.

In and out: records. Imported in the user's process: the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead:
    """All reads of one kind at one line.

    Attributes:
        file: Absolute path of the script's own file, as far as there is one.
        line: The line in it, counted from 1.
        read: Which call read: `item`, `__float__`, `synchronize` ...
        on_device: Whether the value lay on a device, so that the host had to wait for it.
        num: How many there were.
        waited_s: Time from the calls to their returns, of all of them together.
    """

    file: str
    line: int
    read: str
    on_device: bool
    num: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReads:
    """What one window's steps have read, without what lay in evaluations between them.

    Attributes:
        rows: The longest waits first; what is left out took little.
        num_steps: Steps of the window.
        wall_s: Its time, without what lies between steps.
    """

    rows: tuple[HostRead, ...]
    num_steps: int
    wall_s: float
    order: int = -1
