"""Why do several levers not apply, in the same words?

No device; no loader feeds the training, or none can have it; no ranks, or none that sum gradients. In: for each loader
why it cannot, or how a run is divided. Out: one sentence, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_PREFETCH_FACTOR = 2
"""Batches that each worker keeps ready where nothing is said, as PyTorch has it."""

NO_DEVICE = "needs a CUDA device, none was found"


NO_RANKS = "it is for ranks (`--ranks N`): one process sends no gradients"


def why_not_on_ranks(num_ranks: int, mode: str, modes: Sequence[str]) -> str | None:
    """Why a lever of communication has nothing to do; None where it has, which is so in some modes.

    >>> why_not_on_ranks(2, "tensor", ("replicate",))
    'in mode `tensor` gradients are not summed so'
    """
    if num_ranks < 2:
        return NO_RANKS
    return None if mode in modes else f"in mode `{mode}` gradients are not summed so"


def why_none(reasons: Sequence[str | None]) -> str | None:
    """The first loader's reason; None where some loader has none.

    >>> why_none(["too small", None]), why_none(["too small", "too large"])
    (None, 'too small')
    """
    if not reasons:
        return "no DataLoader feeds the training"
    return None if None in reasons else reasons[0]
