"""huge_pages: let the C library ask the kernel for pages of 2 MiB, so that fresh memory costs 512 times fewer faults.

Where the kernel gives such pages to those who ask alone (`madvise`), glibc 2.35 and later asks for what it takes from
the kernel if it is told so as the process starts (`GLIBC_TUNABLES`, `glibc.malloc.hugetlb=1`). Beside `heap`, which
keeps memory, what is taken anew is less, and reaching it costs fewer entries of the processor's tables of addresses.
A block that is used in part may hold up to 2 MiB more. The script finds the variable as plain has it, and programs
that it starts are not told; under a launcher (`flatout exec`) they are.

Source: the GNU C Library manual, "Memory Allocation Tunables"; the Linux kernel's "Transparent Hugepage Support".
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.levers.heap import per_step, why_not_worth_it, without_faults
from flatout.guest.c_library import environment_decides
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Holds all modes, with the present one in brackets."""

FIRST_GLIBC = (2, 35)
"""The first that knows the tunable."""

TUNABLE = "glibc.malloc.hugetlb=1"


class HugePages(Lever):
    """`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`."""

    name = "huge_pages"
    summary = "memory taken from the kernel in pages of 2 MiB"
    class_ = "exact"
    shortens: ClassVar = ("data", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    needs_whole_parameters = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On Linux with glibc 2.35, where the kernel waits to be asked and page faults take a part of the step."""
        if lacking := self.lacks(machine):
            return lacking
        if decided := environment_decides():
            return f"the environment decides already (`{decided}`)"
        return why_not_worth_it(facts)

    def lacks(self, machine: Machine) -> str | None:
        """Linux, glibc that knows the setting, and a kernel that gives huge pages to those who ask."""
        if not machine.operating_system.startswith("Linux"):
            return "this is not Linux"
        if glibc_version() < FIRST_GLIBC:
            return "the C library is not glibc 2.35 or later"
        now = mode()
        if now == "always":
            return "this kernel gives huge pages unasked"
        return None if now == "madvise" else "this kernel gives no huge pages"

    def promise(self, facts: Facts) -> float:
        """The page faults that were counted, saved."""
        return without_faults(facts)

    def environment(self, settings: Mapping[str, Setting]) -> dict[str, str]:
        """The setting, behind what the user tells glibc; nothing where that decides it already."""
        own = os.environ.get("GLIBC_TUNABLES", "")
        if TUNABLE.partition("=")[0] in own:
            return {}
        return {"GLIBC_TUNABLES": f"{own}:{TUNABLE}" if own else TUNABLE}

    def evidence(self, session: Session) -> str | None:
        """The memory that is in such pages, and the page faults that are left in a step."""
        try:
            lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            return None
        mib = sum(int(line.split()[1]) for line in lines.splitlines() if line.startswith("AnonHugePages:")) // 1024
        num = session.page_faults.per_step
        return f"{mib:,} MiB of memory in pages of 2 MiB" + per_step(num) if mib else None


def mode(path: Path = MODES) -> str | None:
    """What the kernel does by itself: `always`, `madvise` or `never`; None where it does not say."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return found and found[1]


def glibc_version() -> tuple[int, ...]:
    """The C library's, as in `(2, 36)`; empty where it is another one."""
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".") if part.isdigit()) if name == "glibc" else ()
