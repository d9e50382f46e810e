"""numa: keep the threads of operations on one NUMA node, where the machine has several.

Memory of another node is slower to reach, and threads of several nodes that share work send each other its lines.
OpenMP binds all threads to the node's processors together, by variables that it reads once: it needs a new process.
Memory is taken where it is first touched, as ever, and so on that node while it has room. The number of threads stays
as in plain, and with it the order in which numbers are added: more threads than the node has processors share them,
so on a CPU it is worth most beside `threads`. Workers that the script forks inherit the processors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.machine.numa_nodes import numa_nodes
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.numa import chosen, why_no_choice
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

ROOT = Path("/")

PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""By which OpenMP is told where to bind threads."""


class Numa(Lever):
    """`OMP_PLACES` with one place: a node."""

    name = "numa"
    summary = "threads kept on one NUMA node: the one with most processors, or `node`"
    class_ = "exact"
    shortens: ClassVar = ("data", "copy", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    deals_out_cores = True
    parameter = "node"
    optional = True

    def lacks(self, machine: Machine) -> str | None:
        """Several nodes with processors that this process may use, and memory of one of them."""
        return why_no_choice(machine.numa_nodes)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Several nodes, and threads that nobody has bound."""
        missing = self.lacks(machine)
        if missing is not None:
            return missing
        decided = next((name for name in PLACES if name in os.environ), None)
        if decided is not None:
            return f"the environment decides already (`{decided}`)"
        if facts.distributed:
            return "several processes train together, which would all be bound to the same node"
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """No number: which processors there are may be another matter in the next run."""
        return ({},)

    def environment(self, settings: Mapping[str, Setting]) -> dict[str, str]:
        """What OpenMP reads at its start; nothing where it is told already, or there is no such node."""
        nodes = numa_nodes(os.sched_getaffinity(0), os.environ, ROOT)
        wanted = settings.get("node")
        fit = [node for node in nodes if wanted in (None, node.number) and node.memory_allowed and node.memory_bytes]
        if len(nodes) < 2 or not fit or any(name in os.environ for name in PLACES):
            return {}
        return {"OMP_PROC_BIND": "close", "OMP_PLACES": f"{{{','.join(map(str, chosen(fit).cpus))}}}"}

    def evidence(self, session: Session) -> str | None:
        """The processors on which the thread that trains may run, as the kernel says."""
        place = {int(word) for word in os.environ.get("OMP_PLACES", "").strip("{}").split(",") if word.isdigit()}
        here = os.sched_getaffinity(0)
        return f"{len(here)} processor{'s' * (len(here) != 1)} of a NUMA node" if place and here <= place else None
