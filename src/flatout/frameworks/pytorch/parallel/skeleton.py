"""What of a value is no tensor? What a call is given or returns beside tensors decides, or tells, what it does.

In: any value. Out: its numbers, words and kinds of objects with their places, as text that can be compared.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.seams.trees import MAX_DEPTH, parts_of


def skeleton(value: Any) -> str:
    """Everything but the tensors.

    >>> skeleton((torch.zeros(2), {"n": 3})), skeleton(torch.zeros(5))
    ('tuple(0:T,1:dict(n:3))', 'T')
    """
    return _of(value, 0)


def has_numbers_of_floats(value: Any, depth: int = 0) -> bool:
    """Whether there is a float among what is no tensor: most often it was computed from the batch."""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return True
    if isinstance(value, torch.Tensor) or depth >= MAX_DEPTH:
        return False
    return any(has_numbers_of_floats(part, depth + 1) for _, part in parts_of(value))


def flags_of(module: nn.Module) -> str:
    """Switches that a module keeps as plain attributes."""
    return ",".join(f"{name}={value}" for name, value in vars(module).items() if isinstance(value, bool | str))


def _of(value: Any, depth: int) -> str:
    if isinstance(value, torch.Tensor):
        return "T"
    if value is None or isinstance(value, numbers.Number | str | bytes):
        return repr(value)
    if depth >= MAX_DEPTH:
        return type(value).__name__
    parts = ",".join(f"{key}:{_of(part, depth + 1)}" for key, part in parts_of(value))
    return f"{type(value).__name__}({parts})" if parts else type(value).__name__
