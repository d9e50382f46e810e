"""Is an item what the script's own path gives? For items that PyTorch has not put together, and so may be anything.

In: two items. Out: why they differ, or None.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from flatout.frameworks.pytorch.input.items.shadow import difference
from flatout.guest.interruptions import let_through


def item_difference(one: Any, other: Any) -> str | None:
    """What differs between two items, in a few words.

    >>> item_difference((np.zeros(2), "cat"), (np.zeros(2), "dog"))
    'other values'
    """
    try:
        return _difference(one, other)
    except Exception as problem:  # noqa: BLE001  items of any kind, whose `__eq__` may be the script's
        let_through(problem)
        return f"{type(problem).__name__} when they were compared"


def _difference(one: Any, other: Any) -> str | None:
    kind = type(one)
    if kind is not type(other):
        return f"a `{kind.__name__}` where plain has a `{type(other).__name__}`"
    if isinstance(one, torch.Tensor):
        return difference(one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))
    if isinstance(one, np.ndarray):
        same = (one.dtype, one.shape, one.strides, one.tobytes()) == (
            other.dtype, other.shape, other.strides, other.tobytes()
        )  # fmt: skip
        return None if same else "another array"
    if isinstance(one, Image.Image):
        same = (one.mode, one.size, one.info, one.tobytes()) == (other.mode, other.size, other.info, other.tobytes())
        return None if same else "another image"
    if isinstance(one, dict):
        if list(one) != list(other):
            return "other keys"
        return next((why for key in one if (why := _difference(one[key], other[key]))), None)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{len(one)} parts where plain has {len(other)}"
        return next((why for a, b in zip(one, other, strict=True) if (why := _difference(a, b))), None)
    if not any("__eq__" in vars(one) for one in kind.__mro__[:-1]):
        return _difference(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}))
    return None if one == other or one != one else "other values"
