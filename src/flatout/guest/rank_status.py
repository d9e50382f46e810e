"""Where does a rank stand? A page of shared memory that it writes as it goes, and that the parent reads when in doubt.

In: exchanges begun and ended. Out: the same, readable by another process at any moment, also when the rank hangs or is
gone. Standard library only. Writing costs less than a microsecond.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

_LAYOUT = struct.Struct("<qqdddq96s")
NUM_BYTES = 4096
_NUMBER = re.compile(r",? \d+( of \d+)?")
"""What differs between exchanges of one kind."""

LOOK_EVERY_S = 0.02
"""Seconds between looks at a rank's memory: one takes some microseconds."""

KINDS_AT = 512
"""From here on the page tells of each kind of exchange how long it took, as JSON."""

TELL_EVERY_S = 0.25
"""Seconds between writing that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Where a rank stands."""

    num_begun: int = 0
    """Exchanges begun."""
    num_ended: int = 0
    since_s: float = 0.0
    """When the last of them began or ended, on the clock of `time.perf_counter`, which processes share."""
    waited_s: float = 0.0
    """Seconds spent in exchanges in which nothing is computed."""
    first_s: float = 0.0
    """When the first exchange of training began; 0 before."""
    memory_bytes: int = 0
    """The most memory that was seen at an exchange of training: of the device, or resident."""
    name: str = ""
    """What the last one is called."""
    kinds: dict[str, float] = field(default_factory=dict)
    """Of each kind of exchange the seconds in which nothing else was computed, as of a moment ago."""

    @property
    def waits(self) -> bool:
        """Whether it is in an exchange."""
        return self.num_begun > self.num_ended


def page_file(folder: Path, rank: int) -> Path:
    """A rank's page."""
    return folder / f"page-{rank}"


class StatusPage:
    """The page of this rank.

    Args:
        path: Where it lies.
        memory: Tells how many bytes the rank holds now.
    """

    def __init__(self, path: Path, memory: Callable[[], int] = lambda: 0) -> None:
        with open(path, "w+b") as file:
            file.truncate(NUM_BYTES)
            self._memory = mmap.mmap(file.fileno(), NUM_BYTES)
        self._begun = self._ended = 0
        self._waited_s = self._first_s = self._started_s = 0.0
        self._name = b""
        self._memory_of, self._memory_bytes, self._looked_s = memory, 0, 0.0
        self._names: dict[bytes, float] = {}
        self._told_s = 0.0

    def begin(self, name: str) -> None:
        """An exchange begins."""
        self._begun += 1
        self._started_s = perf_counter()
        self._name = name.encode()[:96]
        self._write(self._started_s)

    def end(self, *, waiting: bool) -> None:
        """It is over; `waiting`: nothing was computed meanwhile."""
        self._ended = self._begun
        now_s = perf_counter()
        if waiting:
            took_s = now_s - self._started_s
            self._waited_s += took_s
            self._names[self._name] = self._names.get(self._name, 0.0) + took_s
            if now_s - self._told_s > TELL_EVERY_S:
                self._told_s = now_s
                self.tell()
        if now_s - self._looked_s > LOOK_EVERY_S:
            self._looked_s = now_s
            self._memory_bytes = max(self._memory_bytes, self._memory_of())
        self._write(now_s)

    def trains(self) -> None:
        """What came until now was the start, not training."""
        self._waited_s, self._first_s, self._memory_bytes = 0.0, perf_counter(), 0
        self._names.clear()

    def tell(self) -> None:
        """Write how long each kind of exchange took; what has only numbers different is one kind."""
        kinds: dict[str, float] = {}
        for name, took_s in self._names.items():
            kind = _NUMBER.sub("", name.decode(errors="replace")).strip()
            kinds[kind] = round(kinds.get(kind, 0.0) + took_s, 4)
        room = NUM_BYTES - KINDS_AT
        text = json.dumps(kinds).encode()
        if len(text) <= room:
            self._memory[KINDS_AT:NUM_BYTES] = text.ljust(room, b"\0")

    def _write(self, now_s: float) -> None:
        _LAYOUT.pack_into(
            self._memory, 0, self._begun, self._ended, now_s, self._waited_s, self._first_s,
            self._memory_bytes, self._name,
        )  # fmt: skip


def read(path: Path) -> RankStatus | None:
    """Where the rank of a page stands, or stood last; None where there is no page yet."""
    try:
        page = path.read_bytes()
    except OSError:
        return None
    if len(page) < _LAYOUT.size:
        return None
    raw, text = page[: _LAYOUT.size], page[KINDS_AT:].rstrip(b"\0")
    kinds: dict[str, float] = {}
    with contextlib.suppress(ValueError):  # while it is being written
        kinds = json.loads(text) if text else {}
    begun, ended, since_s, waited_s, first_s, memory_bytes, name = _LAYOUT.unpack(raw)
    return RankStatus(
        num_begun=begun, num_ended=ended, since_s=since_s, waited_s=waited_s, first_s=first_s,
        memory_bytes=memory_bytes, name=name.rstrip(b"\0").decode(errors="replace"), kinds=kinds,
    )  # fmt: skip
