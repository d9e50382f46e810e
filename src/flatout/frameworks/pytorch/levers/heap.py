"""heap: keep the memory that a step frees for the next one, instead of taking it from the kernel again.

The C library gives large blocks back as they are freed, and what is free at the heap's end; the next step takes them
anew, and the kernel clears every page at its first touch (a page fault). Engaged, blocks of any size come from the
heap, and what is free at its end is given back beyond a quarter of the memory that was free at the start; where that is
more than 2 GiB, the largest number that glibc takes, nothing is given back. So a process keeps at most what it had
asked for at its peak, and so does each worker that it forks. Programs that it starts are as ever; no variable is set.

What is asked for zeroed (`numpy.zeros`) is then written in whole, where the kernel would give pages only as they are
touched: a large array of which a script uses little takes all of its memory, and the time to write it.

It needs a new process: taken back in mid-run, plain steps would be served from what the heap still holds, and would be
faster than plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.guest.c_library import PROBE_BYTES, c_library, environment_decides, is_mapping_of_its_own, why_not_glibc
from flatout.records.ceilings import Machine
from flatout.records.facts import NOT_LOOKED_AT, Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Source: `mallopt(3)`, Linux manual pages."""

MOST_TRIM_BYTES = 2**31 - 1
"""`mallopt` takes an `int`; -1 stands for no limit."""

FRESH_PAGE_S = 1e-6
"""What a page costs at its first touch, about: the exception, and 4 KiB that are cleared."""

MOST_OF_A_STEP = 0.95
"""What page faults are believed to take of a step at most: on some machines one costs less than `FRESH_PAGE_S`."""

WORTH_A_PROCESS = 0.02
"""Share of the step that page faults must take, by that price, for the lever to be tried."""


class Heap(Lever):
    """`mallopt` with `M_MMAP_MAX` and `M_TRIM_THRESHOLD`."""

    name = "heap"
    summary = "memory that a step frees kept for the next one, not given back to the kernel"
    class_ = "exact"
    shortens: ClassVar = ("data", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    needs_whole_parameters = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On Linux with glibc, where page faults take a part of the step and the environment has not decided."""
        if not machine.operating_system.startswith("Linux"):
            return "this is not Linux"
        if decided := environment_decides():
            return f"the environment decides already (`{decided}`)"
        return why_not_worth_it(facts)

    def promise(self, facts: Facts) -> float:
        """The page faults that were counted, saved."""
        return without_faults(facts)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Before the script goes on: no blocks of their own, and the end of the heap kept."""
        from flatout.frameworks.pytorch.session import Unavailable
        from flatout.machine.control_groups import free_memory_bytes

        if reason := why_not_glibc():
            raise Unavailable(reason)
        share = (free_memory_bytes() or 0) // 4
        c = c_library()
        if not (c.mallopt(M_MMAP_MAX, 0) and c.mallopt(M_TRIM_THRESHOLD, -1 if share > MOST_TRIM_BYTES else share)):
            raise Unavailable("glibc refuses the settings")

    def release(self, session: Session) -> None:
        """It stays until the process ends."""

    def evidence(self, session: Session) -> str | None:
        """A large block that comes from the heap, and the page faults that are left in a step."""
        if why_not_glibc() is not None or is_mapping_of_its_own(PROBE_BYTES):
            return None
        return "large blocks come from the heap" + per_step(session.page_faults.per_step)


def per_step(num: int | None) -> str:
    """The page faults that are left, behind other evidence."""
    return "" if num is None else f", {num:,} page faults a step"


def without_faults(facts: Facts) -> float:
    """How many times as fast a step would be without its page faults, by that price."""
    if facts.warm_up_step_s <= 0:
        return 1.0
    share = (facts.page_faults_per_step or 0) * FRESH_PAGE_S / facts.warm_up_step_s
    return 1 / (1 - min(share, MOST_OF_A_STEP))


def why_not_worth_it(facts: Facts) -> str | None:
    """Why fewer page faults would bring nothing; None where they may."""
    num = facts.page_faults_per_step
    if num is None:
        return NOT_LOOKED_AT
    if num * FRESH_PAGE_S < WORTH_A_PROCESS * facts.warm_up_step_s:
        return f"hardly any page faults ({num:,} in a step of {facts.warm_up_step_s * 1e3:,.0f} ms)"
    return None
