"""Which NUMA nodes has this machine, and what of each may this process use?

A node is a part of the memory with the processors that are near to it. In: `/sys/devices/system/node`, what the kernel
says of this process's memory in `/proc/self/status`, and where the NVIDIA driver says its devices are. Out: `NumaNode`
records. Needs no framework; the user's process loads it where a lever asks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from flatout.machine.control_groups import text_of
from flatout.records.numa import NumaNode

NODES = "sys/devices/system/node"
GPUS = "proc/driver/nvidia/gpus"


def numa_nodes(allowed: Collection[int], environment: Mapping[str, str], root: Path = Path("/")) -> list[NumaNode]:
    """The nodes with some of the `allowed` processors, by number; empty where the kernel names none.

    Args:
        allowed: The logical processors that this process may use.
        environment: Where `CUDA_VISIBLE_DEVICES` is looked for.
        root: Where `/sys` and `/proc` are; tests pass a made-up tree.
    """
    memory = re.search(r"^Mems_allowed_list:\s*(\S+)", text_of(root / "proc/self/status"), re.MULTILINE)
    near = _node_of_first_gpu(environment.get("CUDA_VISIBLE_DEVICES"), root)
    found = []
    for number in sorted(parse_cpu_list(text_of(root / NODES / "online"))):
        cpus = parse_cpu_list(text_of(root / NODES / f"node{number}/cpulist")) & frozenset(allowed)
        total = re.search(r"MemTotal:\s+(\d+) kB", text_of(root / NODES / f"node{number}/meminfo"))
        if cpus:
            found.append(
                NumaNode(
                    number=number,
                    cpus=tuple(sorted(cpus)),
                    memory_bytes=int(total[1]) * 1024 if total else 0,
                    memory_allowed=memory is None or number in parse_cpu_list(memory[1]),
                    near_accelerator=number == near,
                )
            )
    return found


def parse_cpu_list(text: str) -> frozenset[int]:
    """The processors, or nodes, in a kernel list.

    >>> sorted(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _node_of_first_gpu(visible: str | None, root: Path) -> int | None:
    """The node of the GPU that a script sees as its first; None where there is none, or nothing tells.

    The driver's folders are named by PCI address. In their order lie the numbers that `CUDA_VISIBLE_DEVICES` names,
    where all GPUs are alike or `CUDA_DEVICE_ORDER` is `PCI_BUS_ID`.
    """
    try:
        addresses = sorted(folder.name for folder in (root / GPUS).iterdir())
    except OSError:
        return None
    first = "0" if visible is None else visible.partition(",")[0].strip()
    if first.isdecimal():
        named = addresses[int(first) : int(first) + 1]
    else:
        named = [one for one in addresses if first and first in text_of(root / GPUS / one / "information")]
    node = text_of(root / "sys/bus/pci/devices" / named[0] / "numa_node").strip() if named else ""
    return int(node) if node.isdecimal() else None  # -1 where the firmware does not say
