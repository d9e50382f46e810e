"""threads: how many threads one operation uses (intra-op).

Small operations lose more by waking threads than they gain by sharing work; too many threads for the cores wait for
each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class Threads(Lever):
    """`torch.set_num_threads`."""

    name = "threads"
    parameter = "num"
    least = 1
    summary = "threads that one operation uses on the CPU"
    class_ = "rounding"
    shortens: ClassVar = ("data", "forward", "loss", "backward", "optimizer")
    check = "gradients"
    deals_out_cores = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On a CPU where another number than now is possible."""
        if not self.settings(facts, machine):
            return "one core, one thread: nothing to choose"
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """As many as cores, half of them, and one; without the present number."""
        cores = machine.num_cores
        choices = {cores, max(cores // 2, 1), 1}
        return tuple({"num": n} for n in sorted(choices - {facts.num_threads}))

    def frees(self, facts: Facts, machine: Machine) -> Mapping[str, Mapping[str, Setting]]:
        """As many threads as cores, where the script has more."""
        return {"fitting_threads": {"num": machine.num_cores}} if facts.num_threads > machine.num_cores else {}

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set the number, keeping the script's, also in threads that call models."""
        import torch

        session.kept[self.name] = torch.get_num_threads()
        session.calls.thread_counts.wanted = int(settings["num"]) if session.calls.infers else 0
        torch.set_num_threads(int(settings["num"]))

    def release(self, session: Session) -> None:
        """Back to the script's number."""
        import torch

        session.calls.thread_counts.wanted = 0
        torch.set_num_threads(session.kept.pop(self.name))

    def evidence(self, session: Session) -> str | None:
        """What PyTorch says it uses."""
        import torch

        return f"{torch.get_num_threads()} threads"
