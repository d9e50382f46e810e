"""How is nothing shown of a warning that is not the script's, and nothing lost of those that are?

In: code of ours that may warn. Out: the same, silent.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch


@contextlib.contextmanager
def unseen_warnings() -> Iterator[None]:
    """No warning is shown meanwhile, in any thread, and the script still gets each of them later.

    `warnings.catch_warnings` has Python forget which warnings it has given once, so each would come again.
    """
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else it would count as said
    nothing = ("ignore", None, Warning, None, 0)
    filters = cast("list[Any]", warnings.filters)
    filters.insert(0, nothing)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody has emptied it
            filters.remove(nothing)
        torch.set_warn_always(always)
