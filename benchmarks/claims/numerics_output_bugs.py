"""Bugs in the values of what a model returns, while every gradient comes as if they were right.

In: nothing. Out: what is done to outputs, and plants that do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numerics_planting import Plant, Undo, around
from torch import nn

Change = Callable[[torch.Tensor], torch.Tensor]


def valued(change: Change) -> Plant:
    """Floats that the model returns have other values; gradients pass as if they had not."""

    class Valued(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            return change(value)

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    return each_output(lambda value: Valued.apply(value) if value.is_floating_point() else value)


def each_output(change: Change) -> Plant:
    """Each tensor that the model returns is changed."""

    def changed(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
        out = compute(*args, **kwargs)
        return tuple(change(o) for o in out) if isinstance(out, tuple) else change(out)

    return around(changed)


def shifted(value: torch.Tensor) -> torch.Tensor:
    """A bias that is added once too often."""
    return value + 0.01 * torch.linspace(0, 1, value.shape[-1]).to(value.dtype)


def rounded(value: torch.Tensor) -> torch.Tensor:
    """Kept in bfloat16, and cast back."""
    return value.bfloat16().to(value.dtype)


def wholes_zero(value: torch.Tensor) -> torch.Tensor:
    """Whole numbers are not computed."""
    return value if value.is_floating_point() else torch.zeros_like(value)


def one_other(value: torch.Tensor) -> torch.Tensor:
    """One whole number of many is another."""
    if value.is_floating_point() or value.dtype == torch.bool:
        return value
    return torch.cat([value[:1] + 1, value[1:]])


def memory_reused(session: Any) -> Undo:
    """Every call writes its output into the memory of the one before, as captured graphs do."""
    kept: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def reusing(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
        class Reused(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
                memory = kept.setdefault((id(module), value.shape), torch.empty_like(value)).copy_(value)
                return torch.empty(0).set_(memory.untyped_storage(), 0, memory.shape, memory.stride())

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient

        return Reused.apply(compute(*args, **kwargs))

    return around(reusing)(session)


def buffer_spoilt(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """The last row of a buffer that grows is not what was put there."""
    out = compute(*args, **kwargs)
    module.means = torch.cat([module.means[:-1], torch.zeros_like(module.means[-1:])])
    return out
