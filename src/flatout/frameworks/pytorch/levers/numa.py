"""numa: keep threads and memory on one NUMA node, where the machine has several.

Memory of another node is slower to reach, and threads of several nodes that share work send each other its lines.
Engaged, all threads of the process run on one node's processors, and memory is taken there first. The policy is
`MPOL_PREFERRED`, not `MPOL_BIND`: where the node is full, memory of another one is slow, while under `MPOL_BIND` the
kernel would kill the training.

It needs a new process, because memory stays where it was touched first. What was taken before PyTorch was imported is
where it is. The number of threads stays as in plain, and with it the order in which numbers are added: more threads
than the node has processors share them, so on a CPU it is worth most beside `threads`. Workers and programs that the
script starts inherit both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.numa import NumaNode, chosen, why_no_choice
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

ROOT = Path("/")

MOST_OF_A_NODE = 0.8
"""Share of a node's memory that the training may have at its peak: the rest is the system's, and its files'."""

PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""By which OpenMP binds its threads itself, to processors of any node."""


class Numa(Lever):
    """`sched_setaffinity` and `set_mempolicy`."""

    name = "numa"
    summary = "threads and memory kept on one NUMA node: the one with most processors, or `node`"
    class_ = "exact"
    shortens: ClassVar = ("data", "copy", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    parameter = "node"
    optional = True
    conflicts: ClassVar = ("cpu_affinity",)  # binds threads to processors of all nodes

    def lacks(self, machine: Machine) -> str | None:
        """Several nodes with processors that this process may use, and memory of one of them."""
        return why_no_choice(machine.numa_nodes)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Several nodes, one of which has memory enough, and threads that nobody has bound."""
        missing = self.lacks(machine)
        if missing is not None:
            return missing
        decided = next((name for name in PLACES if name in os.environ), None)
        if decided is not None:
            return f"the environment decides already (`{decided}`)"
        if facts.distributed:
            return "several processes train together, which would all be bound to the same node"
        node = chosen(machine.numa_nodes)
        if facts.resident_bytes > MOST_OF_A_NODE * node.memory_bytes:
            sizes = facts.resident_bytes / 2**30, node.memory_bytes / 2**30
            return f"the training takes {sizes[0]:,.1f} GiB, of {sizes[1]:,.1f} GiB that a node has"
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """No number: which processors there are may be another matter in the next run."""
        return ({},)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Before the script goes on, and so before it takes memory."""
        import torch

        from flatout.frameworks.pytorch.observe import memory_policy
        from flatout.frameworks.pytorch.session import Unavailable
        from flatout.machine.numa_nodes import numa_nodes

        decided = next((name for name in PLACES if name in os.environ), None)
        if decided is not None:
            raise Unavailable(f"the environment decides already (`{decided}`)")
        torch.get_num_threads()  # PyTorch decides at the first question, by the processors that it finds then
        try:
            if not memory_policy.present().is_plain:
                raise Unavailable("a memory policy was chosen already, by `numactl` for example")
            node = _wanted(numa_nodes(os.sched_getaffinity(0), os.environ, ROOT), settings.get("node"))
            binding = Binding(node)
            binding.bind()
        except OSError as problem:
            raise Unavailable(f"the kernel refuses to bind threads or memory to a NUMA node: {problem}") from problem
        session.kept[self.name] = binding

    def release(self, session: Session) -> None:
        """Threads run where they could, and memory is taken as before; what lies somewhere stays there."""
        binding = session.kept.pop(self.name, None)
        if binding is not None:
            binding.release()

    def evidence(self, session: Session) -> str | None:
        """What the kernel says of the thread that trains."""
        binding = session.kept.get(self.name)
        if binding is None:
            return None
        wrong = binding.wrong()
        if wrong is not None:
            session.unavailable[self.name] = wrong
            return None
        session.unavailable.pop(self.name, None)
        num = len(binding.node.cpus)
        return f"{num} processor{'s' * (num != 1)} of NUMA node {binding.node.number}, and its memory first"


class Binding:
    """A process's threads and memory on one node.

    Attributes:
        node: Which.
    """

    def __init__(self, node: NumaNode) -> None:
        self.node = node
        self._cpus: set[int] = set()
        """Where it ran before."""

    def bind(self) -> None:
        """From here on.

        Raises:
            OSError: The kernel refuses it; then nothing has changed.
        """
        from flatout.frameworks.pytorch.observe import memory_policy
        from flatout.frameworks.pytorch.observe.memory_policy import PREFERRED, Policy

        self._cpus = os.sched_getaffinity(0)
        memory_policy.choose(Policy(mode=PREFERRED, nodes=frozenset({self.node.number})))
        try:
            memory_policy.bind_threads(self.node.cpus)
        except OSError:
            with contextlib.suppress(OSError):
                self.release()
            raise

    def release(self) -> None:
        """As before.

        Raises:
            OSError: The kernel refuses it.
        """
        from flatout.frameworks.pytorch.observe import memory_policy

        try:
            memory_policy.choose(memory_policy.Policy())
        finally:
            memory_policy.bind_threads(self._cpus)

    def wrong(self) -> str | None:
        """What is otherwise in the calling thread, in a few words; None where nothing is."""
        from flatout.frameworks.pytorch.observe import memory_policy

        if not os.sched_getaffinity(0) <= set(self.node.cpus):
            return "the script has chosen other processors"
        if memory_policy.present().nodes != {self.node.number}:
            return "the script has chosen another memory policy"
        return None


def _wanted(nodes: Sequence[NumaNode], number: Setting | None) -> NumaNode:
    """The node of that number, or the one to choose.

    Raises:
        Unavailable: There is none such.
    """
    from flatout.frameworks.pytorch.session import Unavailable

    missing = why_no_choice(nodes)
    if missing is not None:
        raise Unavailable(missing)
    if number is None:
        return chosen(nodes)
    node = next((one for one in nodes if one.number == number), None)
    if node is None:
        raise Unavailable(f"no processor of NUMA node {number} may be used here")
    if not node.memory_allowed or not node.memory_bytes:
        raise Unavailable(f"no memory of NUMA node {number} may be used here")
    return node
