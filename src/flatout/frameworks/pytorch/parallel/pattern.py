"""What is known of one kind of call: how it is divided, and what its first call gave. Records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.assembly import Rule, are_alike
from flatout.frameworks.pytorch.parallel.cuts import Cut
from flatout.frameworks.pytorch.parallel.held import Leaves


@dataclass(slots=True)
class Pattern:
    """How calls of one kind are divided.

    Attributes:
        cut: Where the batch is in the inputs.
        rules: How each output is put together; None where every rank computes all of the batch.
        noise: Whether the call draws noise for samples.
        masks: Whether it draws masks of dropout.
    """

    cut: Cut
    rules: tuple[Rule, ...] | None
    noise: bool = False
    masks: bool = False
    decided: bool = True
    """Whether one rule alone gave each output; else calls are computed both ways until that is so."""
    num_calls: int = 0
    """Calls since the first."""
    sizes: set[tuple[Any, ...]] = field(default_factory=set)
    """Shapes with which it was confirmed."""

    def is_alike(self, other: Pattern) -> bool:
        """Whether the outputs of two calls are put together in one way."""
        pairs = zip(self.rules or (), other.rules or (), strict=False)
        return len(self.rules or ()) == len(other.rules or ()) and all(are_alike(a, b) for a, b in pairs)

    def rules_with(self, other: Pattern) -> tuple[Rule, ...] | None:
        """These, but for what another call tells more of."""
        if self.rules is None or other.rules is None or not self.is_alike(other):
            return self.rules
        return tuple(b if b.blocks > 1 else a for a, b in zip(self.rules, other.rules, strict=True))


@dataclass(slots=True)
class Computed:
    """Outputs, the inputs that gradients are wanted of, and the whole parameters that it was computed with."""

    outputs: list[torch.Tensor]
    entered: Sequence[torch.Tensor]
    leaves: Leaves = ()


@dataclass(slots=True)
class Check:
    """A first call, to be gone back through both ways.

    Attributes:
        whole: Computed on the whole batch.
        mine: `Computed` on this rank's part, or `Passed` by all ranks together.
        inputs: Of the call.
    """

    whole: Computed
    mine: Any
    inputs: Any
