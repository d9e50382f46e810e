"""At which lines does the script wait for a value on the host, and how long?

In: what windows have noted. Out: `ReadSites`, with each line as it is written.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.records.host_reads import HostRead, HostReads

WORTH_SAYING = 1e-3
"""A value that lies on the host is worth a line from this share of the step on; one on a device always is."""

MOST_SITES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSite:
    """One line of the script at which a tensor's value is read on the host.

    Attributes:
        file: The script's own file.
        line: The line in it.
        code: What stands there; empty where that cannot be read.
        read: Which call read: `item`, `__float__`, `synchronize` ...
        on_device: Whether the value lay on a device, so that the host had to wait for it.
        reads_per_step: How often in a mean step.
        waited_s: Seconds of a mean step that passed in these reads.
    """

    file: str
    line: int
    code: str
    read: str
    on_device: bool
    reads_per_step: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSites:
    """All such lines, those that take longest first.

    Attributes:
        sites: Those that are worth saying.
    """

    sites: tuple[ReadSite, ...]


def judged(seen: Sequence[HostReads]) -> ReadSites | None:
    """The lines that windows of the plain script have seen; None where no step was looked at."""
    num_steps = sum(one.num_steps for one in seen)
    if not num_steps:
        return None
    step_s = math.fsum(one.wall_s for one in seen) / num_steps
    by_line: dict[tuple[str, int, str, bool], list[HostRead]] = {}
    for row in (row for one in seen for row in one.rows):
        by_line.setdefault((row.file, row.line, row.read, row.on_device), []).append(row)
    found = [
        ReadSite(
            file=file, line=line, code=linecache.getline(file, line).strip(), read=read, on_device=on_device,
            reads_per_step=sum(row.num for row in rows) / num_steps,
            waited_s=math.fsum(row.waited_s for row in rows) / num_steps,
        )
        for (file, line, read, on_device), rows in by_line.items()
    ]  # fmt: skip
    worth = [site for site in found if site.on_device or site.waited_s >= WORTH_SAYING * step_s]
    return ReadSites(sites=tuple(sorted(worth, key=lambda site: -site.waited_s)[:MOST_SITES]))
