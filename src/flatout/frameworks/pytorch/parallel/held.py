"""How does a rank hold a model's parameters?

Whole (`gradients.py`), some rows of each (`shards.py`), or parts with which it computes its share of the model
(`parts.py`). What a divided call needs of any of them. A record of the contract only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

Found = list[torch.Tensor | None]

Leaves = Sequence[torch.Tensor]
"""Whole parameters that a graph begins with, one for each that is trained; empty where those held are meant."""


class Held(Protocol):
    """The parameters of one module on this rank."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The script's own objects, from which a divided call's node hangs."""

    def renew(self) -> None:
        """Follow what the script has done to the module's parameters since the last call."""

    @property
    def used(self) -> list[nn.Parameter]:
        """Those that are trained."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What the graph of a call begins with, beside its inputs."""

    def at_once(self) -> AbstractContextManager[None]:
        """Within, `in_place` exchanges nothing in the middle of a call: it may raise on some ranks."""

    def in_place(self) -> AbstractContextManager[None]:
        """Around a call and around its way back: the module computes with what is held."""

    def in_whole(self) -> AbstractContextManager[Leaves]:
        """Around a call: the module computes as one process does, on every rank alike."""

    def nudged(self, times: int) -> AbstractContextManager[None]:
        """Within, parameters are moved by `times` their last bit, at random."""

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, keep: bool) -> Found:
        """Go back through what was computed here: the gradients of `parameters`, summed over ranks."""

    def close(self) -> None:
        """Hold on to no process group any more: its threads end with it."""

    def gradients(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *,
        summed: bool, leaves: Leaves = (),
    ) -> tuple[Found, Found]:  # fmt: skip
        """Gradients of those used and of inputs, to be compared; `summed` over ranks, or every rank's own alike."""


class HeldInParts(Held, Protocol):
    """Of which a rank has a part each."""

    def evaluated(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute a call of which no gradients are taken."""


class Passed(Protocol):
    """One call of the whole batch that all ranks have computed together."""

    value: Any
    """What the module returned: on every rank the same."""
    outputs: list[torch.Tensor]
    """The tensors in it."""

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """The gradients of all parameters and of those inputs that want one, from those of the outputs."""


class HeldByModel(HeldInParts, Protocol):
    """With which ranks compute one batch together."""

    def passed(self, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: Any, *, silent: bool) -> Passed:
        """Compute a call of the kind that `pattern` tells of (`pattern.py`); `silent`: nothing is drawn within."""
