"""What is known of one kind of call: how it is divided, and what its first call gave. Records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.assembly import Rule, are_alike
from flatout.frameworks.pytorch.parallel.cuts import Cut
from flatout.frameworks.pytorch.parallel.held import Leaves

WHOLE_EVERY = 100
"""A call is computed both ways every so many calls, times the ranks and one: that takes a rank about as long as so many
calls of its part as there are ranks, and one; so 1 % of the time."""


def is_rare(num: int, world: int) -> bool:
    """Whether the call of a kind with this number is computed both ways, for no other reason.

    >>> [num for num in range(1, 1025) if is_rare(num, 2)]
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 512, 600, 900, 1024]
    """
    return num & (num - 1) == 0 or num % (WHOLE_EVERY * (world + 1)) == 0


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

    num_changes: int = 0
    """How often the script had changed something of the module when it was confirmed last (`changes.py`)."""
    confirmed_at: int = 0
    """The call of the module at which that was."""
    is_sampled: bool = True
    """Whether samples tell something of it (`sampling.py`)."""
    taken: tuple[bool, ...] = ()
    """Of which outputs the script took gradients, the last time."""

    def follow(self, former: Pattern) -> None:
        """Take over what was known of the kind."""
        self.sizes, self.num_calls = former.sizes, former.num_calls
        self.is_sampled, self.taken = former.is_sampled, former.taken

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
