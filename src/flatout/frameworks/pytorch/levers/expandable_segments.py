"""expandable_segments: let the memory that PyTorch keeps on the GPU grow in place, instead of in pieces of fixed size.

A script whose tensors change in size from step to step leaves gaps that no tensor fits into. When nothing fits any
more, PyTorch waits for the GPU, gives what is free back and asks the driver for memory again, which takes milliseconds
each time, or runs out of memory with some free.

PyTorch is told in the process, as it initialises CUDA, together with what the user tells it in `PYTORCH_ALLOC_CONF`:
no variable is set, and programs that the script starts are as ever. It needs a new process, because pieces of memory
that are there already stay as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_bases import CudaLever
from flatout.records.ceilings import Machine
from flatout.records.facts import NOT_LOOKED_AT, Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch reads the first that is there, in this order. Source: `CUDAAllocatorConfig.h` of PyTorch 2.13."""

OPTION = "expandable_segments"

WORTH_A_PROCESS = 0.2
"""Share of the memory held at the peak that no tensor had, from which on it counts as fragmented."""


class ExpandableSegments(CudaLever):
    """`expandable_segments:True` among the settings of PyTorch's allocator."""

    name = OPTION
    summary = "memory on the GPU that grows in place, against fragmentation"
    class_ = "exact"
    shortens: ClassVar = ("data", "copy", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "none"
    proves_once = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A GPU whose memory is fragmented, on Linux, where the user has not decided."""
        if (reason := super().applies(facts, machine)) is not None:
            return reason
        if not machine.operating_system.startswith("Linux"):
            return "this is not Linux"
        if decided := environment_decides():
            return f"the environment decides already (`{decided}`)"
        memory = facts.device_memory
        if memory is None:
            return NOT_LOOKED_AT
        if not memory.num_retries and memory.free_fraction < WORTH_A_PROCESS:
            free = f"{100 * memory.free_fraction:.0f} % of what is held is free at the peak"
            return f"the GPU's memory is hardly fragmented ({free})"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Once the script uses CUDA, not before: until then it may set the variable itself."""
        import torch

        from flatout.frameworks.pytorch.session import Unavailable

        names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
        tell = next((found for name in names if (found := getattr(torch._C, name, None)) is not None), None)
        if torch.version.cuda is None or tell is None:
            raise Unavailable("this PyTorch is built without CUDA, or cannot be told in the process")

        def told() -> None:
            # all at once: telling it anew forgets what is not said again
            own = next((text for name in VARIABLES if (text := os.environ.get(name, "").strip(" ,"))), "")
            with contextlib.suppress(Exception):  # then there is no evidence of an effect, which is said
                if not environment_decides():
                    tell(f"{own},{OPTION}:True" if own else f"{OPTION}:True")

        torch.cuda._lazy_call(told)

    def release(self, session: Session) -> None:
        """It stays until the process ends."""

    def evidence(self, session: Session) -> str | None:
        """The pieces of memory that can grow, and what they hold."""
        import torch

        if not torch.cuda.is_initialized():
            return None
        grown = [one["total_size"] for one in torch.cuda.memory_snapshot() if one.get("is_expandable")]
        num = len(grown)
        return f"{num} segment{'s' * (num != 1)} that can grow, {sum(grown) / 2**20:,.0f} MiB" if num else None


def environment_decides() -> str | None:
    """The variable in which the user says what is incompatible or the same; None where the lever may decide."""
    for name in VARIABLES:
        text = os.environ.get(name, "")
        if OPTION in text or "cudaMallocAsync" in text:  # which is CUDA's own allocator, and has no segments
            return name
    return None
