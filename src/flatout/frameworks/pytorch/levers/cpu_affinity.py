"""cpu_affinity: bind each OpenMP thread to one core, so that the scheduler does not move them.

OpenMP reads its variables once, so this needs a new process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


FEWEST_CORES = 4
"""With fewer it brought nothing that could be told from noise (LeNet, two cores: 0.76x, 0.86x and 1.04x), and each try
takes eight processes."""


class CpuAffinity(Lever):
    """`OMP_PROC_BIND` and the like."""

    name = "cpu_affinity"
    summary = "each thread of an operation bound to one core"
    class_ = "exact"
    shortens: ClassVar = ("forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    conflicts: ClassVar = ("workers",)  # workers inherit the one core that the main thread is bound to

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On a CPU with some cores, where the script has not decided."""
        if machine.num_cores < FEWEST_CORES:
            return f"fewer than {FEWEST_CORES} cores: threads have hardly anywhere to be moved to"
        if facts.device != "cpu":
            return "the work is on the GPU"
        if any(loader.num_workers for loader in facts.loaders):
            return "the loader's workers would share the one core that the main thread is bound to"
        if any(name in os.environ for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")):
            return "the environment decides already"
        return None

    def environment(self, settings: Mapping[str, Setting]) -> dict[str, str]:
        """What OpenMP reads at its start."""
        return {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}

    def evidence(self, session: Session) -> str | None:
        """The variable as the process was started with it."""
        bound = os.environ.get("OMP_PROC_BIND")
        return f"OMP_PROC_BIND={bound}" if bound else None
