"""Do numbers that are nearly zero count as zero? A script may ask for it, of the thread that it asks in.

In: nothing. Out: whether they do in this thread.
"""

from __future__ import annotations

import torch

_DENORMAL = torch.tensor([1e-310], dtype=torch.float64, device="cpu")


def flushes_to_zero() -> bool:
    """See `torch.set_flush_denormal`."""
    return not (_DENORMAL + 0.0).item()
