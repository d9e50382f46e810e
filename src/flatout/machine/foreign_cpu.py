"""How much of the processor did *others* use meanwhile?

In: the kernel's counters at two moments. Out: the share of the usable core-time that went to processes outside our
session, or None where that could not be observed (it is never reported as 0 then). Standard library only and nothing
of flatout: it also runs inside the user's process.

What is foreign: everything that kept the allowed CPUs busy, the hypervisor's steal included, minus the CPU time of
the processes of our session and of their children that have ended. So kernel threads that work for us (disk, network)
count as foreign, and so does a child that started a session of its own until it ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

MIN_WINDOW_S = 0.1
"""Shorter windows are not judged: the kernel counts in ticks of 10 ms, so that one tick would be over 10 %."""

_NUM_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The counters at one moment.

    Attributes:
        monotonic_s: When, by `time.monotonic`.
        cpus: The logical processors that this process may use.
        busy_s: CPU time that anybody used on them since boot, with what the hypervisor took (steal).
        counted_s: The same with the idle time: it stands still where the kernel does not really count.
        own_s: CPU time of our session's processes and of their children that have ended.
    """

    monotonic_s: float
    cpus: tuple[int, ...]
    busy_s: float
    counted_s: float
    own_s: float


def take(session_id: int | None = None, *, proc: Path = Path("/proc")) -> Snapshot | None:
    """The counters now; None where there is no Linux `/proc` to read them from.

    Costs about 20 microseconds of CPU per process on the machine.

    Args:
        session_id: Whose CPU time is our own: all processes of this session; None means the caller's session.
        proc: Where the process file system is mounted.
    """
    session_id = os.getsid(0) if session_id is None else session_id
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    try:
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        own = _read_own_ticks(proc, session_id)
        now_s = time.monotonic()
        counted = busy_and_counted_ticks((proc / "stat").read_text(), cpus)
    except (OSError, AttributeError):  # no Linux, or it may not be asked
        return None
    if counted is None:
        return None
    busy_s, counted_s = (ticks / ticks_per_s for ticks in counted)
    return Snapshot(monotonic_s=now_s, cpus=cpus, busy_s=busy_s, counted_s=counted_s, own_s=own / ticks_per_s)


def fraction(before: Snapshot | None, after: Snapshot | None, *, cores: float | None = None) -> float | None:
    """The share of the usable core-time between two snapshots that others took, 0 to 1.

    Args:
        before: The first snapshot.
        after: The second one, of the same session.
        cores: How many of the allowed CPUs we may use at once (a control group's quota). With fewer than are
            allowed, others harm us only with what no longer fits beside us. None means all allowed CPUs.

    Returns:
        None where it was not observed: a snapshot is missing, the affinity changed in between, the window is shorter
        than `MIN_WINDOW_S`, or the kernel's counters stand still (some sandboxes show zeros).

    >>> start = Snapshot(monotonic_s=0.0, cpus=(0, 1), busy_s=100.0, counted_s=200.0, own_s=10.0)
    >>> end = Snapshot(monotonic_s=10.0, cpus=(0, 1), busy_s=115.0, counted_s=220.0, own_s=20.0)
    >>> fraction(start, end)  # 15 s busy, 10 s of them ours, of 20 s
    0.25
    >>> fraction(start, end, cores=1.5)  # half a core of others, half a core to spare
    0.0
    """
    if before is None or after is None or before.cpus != after.cpus:
        return None
    elapsed_s = after.monotonic_s - before.monotonic_s
    if elapsed_s < MIN_WINDOW_S or after.counted_s <= before.counted_s:
        return None
    foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    allowed = len(before.cpus)
    usable = min(cores, allowed) if cores else allowed
    taken = foreign_s / elapsed_s - (allowed - usable)
    return min(max(taken / usable, 0.0), 1.0)


def at_this_moment(session_id: int | None = None, *, cores: float | None = None, for_s: float = 0.5) -> float | None:
    """The share that others take while `for_s` seconds are waited for; None where it was not observed.

    Args:
        session_id: Whose CPU time is our own, see `take`.
        cores: See `fraction`.
        for_s: How long to look.
    """
    before = take(session_id)
    time.sleep(for_s)
    return fraction(before, take(session_id), cores=cores)


def busy_and_counted_ticks(stat: str, cpus: Collection[int]) -> tuple[int, int] | None:
    r"""Busy ticks, and busy with idle ones, of `cpus` in the text of `/proc/stat`; None when none of them is in it.

    Busy is user, nice, system, irq, softirq and steal. Waiting for a disk is idle; guest time is already in user.

    Source: `proc_stat(5)`, Linux manual pages.

    >>> busy_and_counted_ticks("cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 3 40 50 6 7 8 1 0\n", {0})
    (27, 117)
    """
    rows = []
    for line in stat.splitlines():
        name, *values = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            rows.append([*map(int, values[:8])])
    idle = sum(sum(row[3:5]) for row in rows)  # with the time that waits for a disk
    counted = sum(map(sum, rows))
    return (counted - idle, counted) if rows else None


def own_ticks(process_stats: Iterable[str], session_id: int) -> int:
    """CPU ticks of a session, from the texts of `/proc/<pid>/stat`: own ones, and those of children waited for.

    A process's name may hold spaces and brackets, so fields are counted from the last closing one.

    Source: `proc_pid_stat(5)`, Linux manual pages: field 6 session, 14 utime, 15 stime, 16 cutime, 17 cstime.

    >>> own_ticks(["7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 100 20 3 1 20 0", "8 (c) S 1 8 8 0 -1 0 0 0 0 0 9 9 9 9 20 0"], 7)
    124
    """
    total = 0
    for text in process_stats:
        fields = text.rpartition(")")[2].split()
        if len(fields) > 14 and int(fields[3]) == session_id:
            total += sum(map(int, fields[11:15]))
    return total


def _read_own_ticks(proc: Path, session_id: int) -> int:
    """Read again when a process ended meanwhile: its time may just have moved to its parent, which was read before."""
    for _ in range(_NUM_ATTEMPTS):
        texts, has_vanished = [], False
        for entry in filter(str.isdigit, os.listdir(proc)):
            try:
                texts.append((proc / entry / "stat").read_text(encoding="utf-8", errors="replace"))
            except (FileNotFoundError, ProcessLookupError):
                has_vanished = True
            except PermissionError:  # hidden (`hidepid`), so another user's: not our session
                continue
        if not has_vanished:
            break
    return own_ticks(texts, session_id)
