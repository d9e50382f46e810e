"""How does a rank hold a model's parameters? Whole (`gradients.py`) or some rows of each (`shards.py`).

What a divided call needs of either. A record of the contract only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

Found = list[torch.Tensor | None]


class Held(Protocol):
    """The parameters of one module on this rank."""

    parameters: list[nn.Parameter]
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

    def nudged(self, times: int) -> AbstractContextManager[None]:
        """Within, parameters are moved by `times` their last bit, at random."""

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, keep: bool) -> Found:
        """Go back through what was computed here: the gradients of `parameters`, summed over ranks."""

    def close(self) -> None:
        """Hold on to no process group any more: its threads end with it."""

    def gradients(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *,
        summed: bool,
    ) -> tuple[Found, Found]:  # fmt: skip
        """Gradients of those used and of inputs, to be compared; `summed` over ranks, or every rank's own alike."""
