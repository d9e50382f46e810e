"""Do two types of number draw other masks from one random state? Then a step computed in both cannot be compared.

Kernels of a device draw as many numbers at a time as they are wide, which follows the type. In: a replay's operations
that draw. Out: whether nothing but the type lies behind what they drew otherwise. Loaded in trials only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import tensors_of

LEAST_SHARE = 0.01
"""Of all places that are masked on one side alone: a value may become zero by rounding as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One operation that has drawn random numbers: in what type and layout, what it masked, where generators stood."""

    kind: tuple[Any, ...]
    masked: torch.Tensor
    before: RandomStates
    after: RandomStates


class Draws(TorchDispatchMode):
    """Notes what is drawn while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = RandomStates()
        out = func(*args, **kwargs)
        made = tensors_of(out)
        mask = next((~t for t in made if t.dtype == torch.bool), None)  # beside what was kept of the values
        if made:
            masked = made[0] == 0 if mask is None else mask
            kind = (made[0].dtype, made[0].stride())
            self.found.append(Draw(kind=kind, masked=masked, before=before, after=RandomStates()))
        return out


def differ_by_type(changed: Sequence[Draw], plain: Sequence[Draw]) -> bool:
    """Whether the first operation that draws otherwise than plain's does so in another type, and is else the same."""
    for ours, theirs in zip(changed, plain, strict=False):
        if not ours.before.equals(theirs.before) or ours.masked.shape != theirs.masked.shape:
            return False
        share = float((ours.masked != theirs.masked).double().mean()) if ours.masked.numel() else 0.0
        if share > LEAST_SHARE or not ours.after.equals(theirs.after):
            return ours.kind[0] != theirs.kind[0] and ours.kind[1] == theirs.kind[1]
    return False
