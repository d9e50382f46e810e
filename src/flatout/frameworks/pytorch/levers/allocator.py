"""allocator: take memory from an installed jemalloc or tcmalloc instead of from the C library.

It is put in front by `LD_PRELOAD` as the process starts. The script finds its variables as plain has them, and programs
that it starts are not preloaded; processes that it forks have the allocator, as they have all that the process has.
Under a launcher (`flatout exec`) that is not so: there the variables are seen, and reach every program. By itself
jemalloc gives large blocks back at once; it is told to leave what is free to the kernel, which takes it when it needs
it (`MALLOC_CONF`, unless the user has set that). tcmalloc is told to print nothing about large blocks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.levers.heap import why_not_worth_it, without_faults
from flatout.guest.c_library import environment_decides
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

FILES = {
    "jemalloc": ("libjemalloc.so.2",),
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
}
"""What each is called, the smaller build first."""

TOLD: dict[str, dict[str, str]] = {
    "jemalloc": {"MALLOC_CONF": "oversize_threshold:0,muzzy_decay_ms:-1"},
    "tcmalloc": {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(2**62)},
}
"""What each is told through the environment. Sources: jemalloc(3), `opt.oversize_threshold` and `opt.muzzy_decay_ms`;
gperftools, TCMalloc."""

ROOT = Path("/")
PLACES = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "lib64", "lib")


class Allocator(Lever):
    """`LD_PRELOAD` of a library."""

    name = "allocator"
    summary = "memory of the process managed by jemalloc or tcmalloc"
    class_ = "exact"
    shortens: ClassVar = ("data", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    parameter = "library"
    choices: ClassVar = tuple(FILES)
    conflicts: ClassVar = ("heap",)  # which tells the C library what it is not asked any more

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On Linux with one of them installed, where page faults take a part of the step."""
        if not machine.operating_system.startswith("Linux"):
            return "this is not Linux"
        decided = environment_decides()
        if decided:
            return f"the environment decides already (`{decided}`)"
        if not any(map(library, FILES)):
            return "neither jemalloc nor tcmalloc is installed"
        return why_not_worth_it(facts)

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """Those that are installed."""
        return tuple({"library": word} for word in FILES if library(word))

    def promise(self, facts: Facts) -> float:
        """The page faults that were counted, saved."""
        return without_faults(facts)

    def environment(self, settings: Mapping[str, Setting]) -> dict[str, str]:
        """The library before those that the user preloads, and what it is told unless the user tells it."""
        word = str(settings["library"])
        path = library(word)
        if path is None:
            return {}
        own = os.environ.get("LD_PRELOAD")
        told = {name: value for name, value in TOLD[word].items() if name not in os.environ}
        return {"LD_PRELOAD": f"{path}:{own}" if own else str(path), **told}

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Nothing more is to be done where the library is there."""
        from flatout.frameworks.pytorch.session import Unavailable

        word = str(settings["library"])
        if loaded(word) is None:
            raise Unavailable(f"{word} is not loaded" if library(word) else f"{word} is not installed")
        session.kept[self.name] = word

    def release(self, session: Session) -> None:
        """It stays until the process ends."""

    def evidence(self, session: Session) -> str | None:
        """The library among the files that the process has mapped, and the page faults that are left in a step."""
        path = loaded(session.kept.get(self.name, ""))
        num = session.page_faults.per_step
        return path and f"{os.path.basename(path)} is loaded" + ("" if num is None else f", {num:,} page faults a step")


def library(word: str, root: Path = ROOT) -> Path | None:
    """Where it is installed, for this interpreter alone or for all; None where it is not."""
    places = [Path(sys.prefix) / "lib"] if root == ROOT else []
    for pattern in PLACES:
        places += sorted(root.glob(pattern))
    return next((place / name for name in FILES[word] for place in places if (place / name).exists()), None)


def loaded(word: str) -> str | None:
    """The file from which this process has it; None where it has not."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") > 5 and "/" in line}
    except OSError:
        return None
    return next((path for path in sorted(paths) if f"/lib{word}" in path), None)
