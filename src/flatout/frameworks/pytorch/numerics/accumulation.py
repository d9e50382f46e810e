"""Are gradients cleared and added up under a lever as they are under plain?

Replays return gradients and never write into parameters, so a lever that meddles with `zero_grad`, or with how several
backward passes add up, would not show in them. Here the script's own ways of clearing are called on gradients that are
there, and the captured calls' backward passes are added up in the parameters; everything is put back. In: captured
calls and the engaged levers. Out: what is wrong, in words, or nothing. Loaded in trials only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.numerics.between import Clearing
from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.differences import Gradients, reals, relative_error, square
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer

TOLERANCE = 1e-5
"""Relative difference of a sum that was made in another place (its terms are the same to the bit on a CPU)."""


class Accumulation:
    """What plain does, to be held against what a lever does."""

    def __init__(self, replayer: Replayer, calls: Sequence[CapturedCall], clearings: Sequence[Clearing]) -> None:
        self._replayer = replayer
        self._calls = calls
        self._clearings = list(clearings)
        # ranks would wait for each other, and hooks of the script's own would fire, and may update
        self._watched = _distributed() or any(_hooked(p) for c in calls for p in c.call.module.parameters())
        self._plain_left = [] if self._watched else self._left()

    def fault(self, changed: Replayed) -> str:
        """What the engaged levers do wrong; empty where nothing. `changed` is the replay under them."""
        if self._watched:
            return ""
        for clearing, plain, left in zip(self._clearings, self._plain_left, self._left(), strict=True):
            if left > plain:
                return f"`{clearing.owner}.zero_grad` leaves gradients of an earlier step in {left - plain} parameters"
        if not changed.gradients:
            return ""
        summed = self._summed(levers=True)
        if summed is None:
            return ""
        if not relative_error(summed, changed.gradients) <= TOLERANCE:
            return "gradients of several backward passes do not add up"
        return ""

    def _left(self) -> list[int]:
        """For each clearing, in how many parameters something is left after it."""
        found = []
        for clearing in self._clearings:
            target = clearing.target()
            parameters = [] if target is None else list(clearing.parameters_of(target))
            with _gradients_kept(parameters):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                if target is not None:
                    clearing.again(target)
                found.append(sum(p.grad is not None and square(p.grad) > 0 for p in parameters))
        return found

    def _summed(self, *, levers: bool) -> Gradients | None:
        """Gradients as the calls' backward passes add them up in the parameters; None where that cannot be told."""
        modules = {id(c.call.module): c.call.module for c in self._calls}
        parameters = list({p: None for module in modules.values() for p in module.parameters()})
        with _gradients_kept(parameters):
            for parameter in parameters:
                parameter.grad = None
            try:
                self._replayer.run(self._calls, levers=levers, into_parameters=True)
            except RuntimeError:  # computed from values that a former update has changed
                return None
            return {p: reals(p.grad.detach()).clone() for p in parameters if p.grad is not None}  # type: ignore[misc]


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _hooked(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks)


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[Any]) -> Iterator[None]:
    kept = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient, value in kept:
            if gradient is not None and value is not None and gradient.layout is torch.strided:
                gradient.data.copy_(value)
            parameter.grad = gradient
