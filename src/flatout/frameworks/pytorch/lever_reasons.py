"""Why do several levers not apply, in the same words? No device; no loader feeds the training, or none can have it.

In: for each loader why it cannot. Out: one sentence, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

NO_DEVICE = "needs a CUDA device, none was found"


def why_none(reasons: Sequence[str | None]) -> str | None:
    """The first loader's reason; None where some loader has none.

    >>> why_none(["too small", None]), why_none(["too small", "too large"])
    (None, 'too small')
    """
    if not reasons:
        return "no DataLoader feeds the training"
    return None if None in reasons else reasons[0]
