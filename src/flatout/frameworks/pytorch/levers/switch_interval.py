"""switch_interval: Python's interpreter passed on after 10 µs, not 5 ms, to a thread that waits for it.

Each operation gives the interpreter away and waits to get it back: beside a thread of the script's that never sleeps,
up to 5 ms each time. What that thread computes itself it goes on taking.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

SWITCH_US = 10
"""Microseconds; what Python gives back of the seconds that it was given is rounded."""


class SwitchInterval(Lever):
    """`sys.setswitchinterval`."""

    name = "switch_interval"
    summary = "Python's interpreter passed on sooner to a thread that waits for it"
    class_ = "exact"
    shortens: ClassVar = ("data", "copy", "forward", "loss", "backward", "optimizer")
    check = "none"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Another thread of the script's that computes."""
        return None if facts.busy_threads else "no other Python thread computes"

    def frees(self, facts: Facts, machine: Machine) -> Mapping[str, Mapping[str, Setting]]:
        """The wait for the interpreter."""
        return {"free_interpreter": {}} if facts.busy_threads else {}

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set it, keeping the script's."""
        session.kept[self.name] = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_US / 1e6)

    def release(self, session: Session) -> None:
        """Back to the script's, where it has not set another one since."""
        former = session.kept.pop(self.name)
        if _present_us() == SWITCH_US:
            sys.setswitchinterval(former)

    def evidence(self, session: Session) -> str | None:
        """What Python says."""
        return f"passed on after {SWITCH_US} µs" if _present_us() == SWITCH_US else None


def _present_us() -> int:
    return round(1e6 * sys.getswitchinterval())
