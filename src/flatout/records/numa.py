"""Which NUMA node is a process to be bound to, if to any? A record, and the choice among some.

In: the nodes with processors that a process may use (`numa_nodes.py` reads them). Out: one of them, or why not.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One part of the memory, with the processors that are near to it.

    Attributes:
        number: As the kernel counts them.
        cpus: Its logical processors that this process may use.
        memory_bytes: All memory of the node, whoever uses it; 0 where it has none.
        memory_allowed: Whether the control group allows this process memory of the node.
        near_accelerator: Whether the first GPU that this process sees is connected to it.
    """

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int
    memory_allowed: bool = True
    near_accelerator: bool = False


def why_no_choice(nodes: Sequence[NumaNode]) -> str | None:
    """Why there is no node to choose, in a few words; None where there is."""
    if len(nodes) < 2:
        return "the processors that this process may use are of one NUMA node"
    if not any(node.memory_allowed and node.memory_bytes for node in nodes):
        return "the control group allows no memory that is near to the processors"
    return None


def chosen(nodes: Sequence[NumaNode]) -> NumaNode:
    """The one to bind a process to: most processors, then the GPU's, then most memory, then the first.

    Raises:
        ValueError: There is none with memory that this process may use.
    """
    fit = [node for node in nodes if node.memory_allowed and node.memory_bytes]
    return max(fit, key=lambda node: (len(node.cpus), node.near_accelerator, node.memory_bytes, -node.number))
