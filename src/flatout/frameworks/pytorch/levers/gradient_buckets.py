"""gradient_buckets: how many MB of gradients ranks sum at once, beside the rest of the backward pass.

PyTorch's own way is a first bucket of 1 MB, so that sums begin early, and others of 25 MB. Smaller ones begin earlier
and leave less to wait for at the end; larger ones make fewer exchanges; 0 is a single one, which nothing hides. A
parameter is never cut. Which numbers a rank adds first depends on where they lie in a bucket, from three ranks on. In
`replicate+tensor` and `replicate+pipeline` gradients are summed after the backward pass, so many at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.lever_bases import why_not_on_ranks
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.ranks import BUCKETED_MODES
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

MB = 1 << 20

OWN_FIRST_MB, OWN_MB = 1, 25
"""What PyTorch takes. Source: `torch.nn.parallel.DistributedDataParallel`."""

SIZES_MB = (0, 5, 100, 1)


class GradientBuckets(Lever):
    """Sizes that the reducer of DistributedDataParallel is given."""

    name = "gradient_buckets"
    parameter = "mb"
    summary = "gradients summed over ranks in buckets of so many MB; 0 is all at once"
    class_ = "rounding"
    shortens: ClassVar = ("backward", "communication")
    toggles = "process"
    check = "gradients"
    modes: ClassVar = BUCKETED_MODES

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On ranks that hold copies of a model, where another size makes other buckets."""
        reason = why_not_on_ranks(facts.num_ranks, facts.rank_mode, BUCKETED_MODES)
        return reason or (None if self.settings(facts, machine) else "all gradients fit in the first bucket")

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """All at once, 5, 100 and 1, as far as they make other buckets than PyTorch's own sizes."""
        num_bytes = max((model.parameter_bytes for model in facts.trained_models), default=0)
        own = _num_buckets(num_bytes, OWN_FIRST_MB, OWN_MB)
        buckets = {mb: _num_buckets(num_bytes, min(OWN_FIRST_MB, mb), mb) if mb else 1 for mb in SIZES_MB}
        return tuple({"mb": mb} for mb, num in buckets.items() if num != own)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Have models that are divided from now on be summed so."""
        session.communication(BUCKETED_MODES).bucket_bytes = int(settings["mb"]) * MB

    def release(self, session: Session) -> None:
        """PyTorch's own sizes, for models that are divided from now on."""
        if session.ranks is not None:
            session.ranks.group.communication.bucket_bytes = None

    def evidence(self, session: Session) -> str | None:
        """Buckets that were made."""
        num = session.communication(BUCKETED_MODES).num_buckets
        return f"gradients are summed in {num} bucket{'s' * (num != 1)}" if num else None


def _num_buckets(num_bytes: int, first_mb: int, mb: int) -> int:
    """About how many buckets so many bytes make: a parameter is not cut.

    >>> _num_buckets(60 * MB, 1, 25), _num_buckets(MB // 2, 1, 25)
    (4, 1)
    """
    beyond = max(num_bytes - first_mb * MB, 0)
    return 1 + -(-beyond // (mb * MB))
