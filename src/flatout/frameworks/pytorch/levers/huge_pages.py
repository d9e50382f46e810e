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
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.levers.heap import why_not_worth_it, without_faults
from flatout.guest.c_library import PROBE_BYTES, block_of, environment_decides, why_not_glibc
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Holds all modes, with the present one in brackets."""

FIRST_GLIBC = (2, 35)
"""The first that knows the tunable."""

TUNABLE = "glibc.malloc.hugetlb=1"

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
_ASKED_FOR = "hg"
"""Among a mapping's flags: somebody asked for huge pages. Source: proc_pid_smaps(5)."""


class HugePages(Lever):
    """`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`."""

    name = "huge_pages"
    summary = "memory taken from the kernel in pages of 2 MiB"
    class_ = "exact"
    shortens: ClassVar = ("data", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    needs_whole_parameters = True
    conflicts: ClassVar = ("allocator",)  # which the C library's setting does not reach

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On Linux with glibc 2.35, where the kernel waits to be asked and page faults take a part of the step."""
        lacking = self.lacks(machine)
        if lacking:
            return lacking
        decided = environment_decides()
        if decided:
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

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Nothing more is to be done where glibc was told."""
        from flatout.frameworks.pytorch.session import Unavailable

        reason = why_not_asking()
        if reason is not None:
            raise Unavailable(reason)

    def release(self, session: Session) -> None:
        """It stays until the process ends."""

    def evidence(self, session: Session) -> str | None:
        """The kernel asked for huge pages for a large block, the memory in such pages, and the page faults left."""
        if why_not_asking() is not None:
            return None
        num, mib = session.page_faults.per_step, in_huge_pages_mib()
        held = "" if mib is None else f", {mib:,} MiB of memory are in them"
        return "large blocks ask for huge pages" + held + ("" if num is None else f", {num:,} page faults a step")


def mode(path: Path = MODES) -> str | None:
    """What the kernel does by itself: `always`, `madvise` or `never`; None where it does not say."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return found and found[1]


def glibc_version() -> tuple[int, ...]:
    """The C library's, as in `(2, 36)`; empty where it is another one."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, ValueError, OSError):  # not on this system
        return ()
    return tuple(int(part) for part in version.split(".") if part.isdigit()) if name == "glibc" else ()


def why_not_asking() -> str | None:
    """Why the kernel is not asked for huge pages for large blocks here; None where it is."""
    reason = why_not_glibc()
    if reason is None and not asks_for_huge_pages():
        reason = "glibc was not told, or cannot ask the kernel"
    return reason


def asks_for_huge_pages() -> bool:
    """Whether the kernel was asked for huge pages for a large block. Nothing of the block is touched."""
    with block_of(PROBE_BYTES) as block:
        return block is not None and _ASKED_FOR in flags_at(block + PROBE_BYTES // 2)


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping with an address; empty where there is none or it does not say."""
    inside = False
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                head = _MAPPING.match(line)
                if head is not None:
                    inside = int(head[1], 16) <= address < int(head[2], 16)
                elif inside and line.startswith("VmFlags:"):
                    return line.split()[1:]
    except OSError:
        pass
    return []


def in_huge_pages_mib() -> int | None:
    """How much of the process's memory is in huge pages now, MiB; None where the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
            kib = next((int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")), None)
    except (OSError, ValueError):
        return None
    return None if kib is None else kib // 1024
