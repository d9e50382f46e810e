"""At which lines does the script wait for a value, and what would it bring at most to wait for it later?

In: what windows have noted, the files' sources, the plain step's time. Out: `ReadSites`. Nothing of this is a promise:
each bound says what cannot be exceeded, see `docs/explanation/numbers.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flatout.judge.read_uses import Kind, Source, Use
from flatout.records.host_reads import HostRead, HostReads

WORTH_SAYING = 1e-3
"""A value that lies on the host is worth a line from this share of the step on; one on a device always is."""

MOST_SITES = 40

LARGEST_SHARE = 0.999
"""Of the step, what reads are believed to take at most: they were timed in other windows than the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSite:
    """One place of the script at which a tensor's value is read on the host.

    Attributes:
        file: The script's own file.
        line: The line in it.
        code: The expression that reads, as it is written; the whole line where that is not known.
        read: Which call read: `item`, `__float__`, `synchronize` ...
        on_device: Whether the value lay on a device, so that the host had to wait for it.
        reads_per_step: How often in a mean step.
        waited_s: Seconds of a mean step that passed in these reads.
        saved_s: Of these, what reading later could save at most.
        use: `printed`, `unused`, `used` or `not told`.
        why: What shows that; empty where the use says it all.
        ratio: Step time now over step time then, at most.
    """

    file: str
    line: int
    code: str
    read: str
    on_device: bool
    reads_per_step: float
    waited_s: float
    saved_s: float
    use: Kind
    why: str
    ratio: float

    @property
    def deferrable(self) -> bool:
        """Whether nothing but printing needs the value, as far as the function shows."""
        return self.use in ("printed", "unused")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSites:
    """All such places, those that take longest first.

    Attributes:
        sites: Those that are worth saying.
        num_steps: Steps in which was looked.
        step_s: The step that ratios are of: the shorter of the plain one and the one looked at.
        together: Step time now over step time with all those later whose values are only printed, at most; None
            without any.
        num_left_out: Places that take too little to be worth saying.
    """

    sites: tuple[ReadSite, ...]
    num_steps: int
    step_s: float
    together: float | None = None
    num_left_out: int = 0


def judged(seen: Sequence[HostReads], plain_step_s: float, source_of: Callable[[str], str | None]) -> ReadSites | None:
    """The places that windows have seen; None where no step was looked at.

    Args:
        seen: Of windows of the plain script.
        plain_step_s: Its step, timed in windows in which nothing was noted.
        source_of: The text of a file; None where it cannot be read.
    """
    num_steps = sum(one.num_steps for one in seen)
    if not num_steps:
        return None
    seen_step_s = math.fsum(one.wall_s for one in seen) / num_steps
    known = [value for value in (plain_step_s, seen_step_s) if math.isfinite(value) and value > 0]
    if not known:
        return None
    step_s = min(known)
    sources: dict[str, Source | None] = {}
    found = []
    for row in _added(seen):
        if row.file not in sources:
            sources[row.file] = _source(source_of(row.file))
        found.append((_site(row, sources[row.file], num_steps, step_s), row))
    worth = [(site, row) for site, row in found if site.on_device or site.waited_s >= WORTH_SAYING * step_s]
    worth = sorted(worth, key=lambda one: -one[0].waited_s)[:MOST_SITES]
    later = [row for site, row in worth if site.deferrable]
    return ReadSites(
        sites=tuple(site for site, _ in worth),
        num_steps=num_steps,
        step_s=step_s,
        together=_ratio(saved_s(*later) / num_steps, step_s) if later else None,
        num_left_out=len(found) - len(worth),
    )


def saved_s(*rows: HostRead) -> float:
    """Seconds that reading all of these later saves at most.

    Whatever waits for a device: no more than the waits, since nothing else moves by more than that; and no more than
    the host's own time from each to its next wait, since only then does the device stand idle that a host which had
    not waited would have kept busy. Sums, since what one wait less gives, the next one may use. Of a value on the
    host: all that reading it took.

    Source: the order of events in a queue that is emptied at each wait; see `docs/explanation/numbers.md`.

    >>> row = HostRead(file="train.py", line=3, end_line=3, column=0, end_column=11, read="item", within=False,
    ...                on_device=True, num=1, waited_s=0.040, until_next_s=0.002)
    >>> saved_s(row), saved_s(row, row)
    (0.002, 0.004)
    """
    on_device = [row for row in rows if row.on_device]
    on_host_s = math.fsum(row.waited_s for row in rows if not row.on_device)
    waited_s = math.fsum(row.waited_s for row in on_device)
    return on_host_s + min(waited_s, math.fsum(row.until_next_s for row in on_device))


def _added(seen: Sequence[HostReads]) -> list[HostRead]:
    """The rows of all windows, those of one place added."""
    found: dict[tuple[str, int, int, int, int, str, bool, bool], list[HostRead]] = {}
    for row in (row for one in seen for row in one.rows):
        key = (row.file, row.line, row.end_line, row.column, row.end_column, row.read, row.within, row.on_device)
        found.setdefault(key, []).append(row)
    return [
        HostRead(
            file=rows[0].file, line=rows[0].line, end_line=rows[0].end_line, column=rows[0].column,
            end_column=rows[0].end_column, read=rows[0].read, within=rows[0].within, on_device=rows[0].on_device,
            num=sum(row.num for row in rows), waited_s=math.fsum(row.waited_s for row in rows),
            until_next_s=math.fsum(row.until_next_s for row in rows),
        )
        for rows in found.values()
    ]  # fmt: skip


def _source(text: str | None) -> Source | None:
    try:
        return None if text is None else Source(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _site(row: HostRead, source: Source | None, num_steps: int, step_s: float) -> ReadSite:
    use = _use(row, source)
    saved = saved_s(row) / num_steps
    return ReadSite(
        file=row.file,
        line=row.line,
        code=use.code or (source.line(row.line) if source is not None else ""),
        read=row.read,
        on_device=row.on_device,
        reads_per_step=row.num / num_steps,
        waited_s=row.waited_s / num_steps,
        saved_s=saved,
        use=use.kind,
        why=use.why,
        ratio=_ratio(saved, step_s),
    )


def _use(row: HostRead, source: Source | None) -> Use:
    if source is None:
        return Use(kind="not told", why="the source cannot be read")
    if not row.end_line:
        return Use(kind="not told", why="Python does not say where in the line it is read")
    try:
        span = (row.line, row.end_line, row.column, row.end_column)
        return source.use(span, read=row.read, within=row.within)
    except RecursionError:  # an expression of thousands of parts
        return Use(kind="not told", why="the line is too deep to follow")


def _ratio(saved: float, step_s: float) -> float:
    return 1 / (1 - min(saved / step_s, LARGEST_SHARE))
