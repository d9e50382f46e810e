"""device_prefetch: copy batches to the GPU beside what it computes, where the script's `.to(device)` waits for both.

A copy goes through page-locked memory and a stream of its own. For a loader with workers the next batch is on its way
while the training computes, and `.to(device)` finds it done; without workers the copy begins when the script asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_bases import CudaLever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class DevicePrefetch(CudaLever):
    """Copies on a stream of their own, one batch ahead."""

    name = "device_prefetch"
    summary = "batches copied to the GPU while it computes, one ahead where workers have it ready"
    class_ = "exact"
    shortens: ClassVar = ("copy",)
    check = "batches"
    takes_memory = True
    checks_itself = True
    partners: ClassVar = ("pinned_memory",)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next fetch and the next `.to` on."""
        session.require_cuda()
        session.loaders.transfer.engage("prefetch", True, session.loaders.passes)

    def release(self, session: Session) -> None:
        """As plain; a batch that was taken early is still given."""
        session.loaders.transfer.engage("prefetch", False)

    def evidence(self, session: Session) -> str | None:
        """Tensors that were copied so."""
        num = session.loaders.transfer.num
        total = num["staged"] + num["early"]
        return f"{total:,} tensors copied beside the computation, {num['early']:,} of them early" if total else None
