"""What is warned of inside is not said, and not taken for said: the script hears of it where it happens again.

`warnings.catch_warnings` has Python forget which warnings it has given once; here it does not. In: a block.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Inside, no warning is said, in any thread; also none of those that PyTorch says only once."""
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
