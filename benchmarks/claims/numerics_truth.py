"""Levers that change numbers a lot for the better, and for the worse: does float64 tell them apart?

Two scripts err themselves: one computes a variance in one pass, E[x²] - E[x]², of inputs far from zero, which cancels
in float32; one adds up in half precision. Levers that do better are far from plain and closer to the truth. In:
nothing. Out: scripts and levers with what should be said of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from numerics_planting import Plant, set_meanwhile, within
from numerics_scripts import forever
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def one_pass(x: torch.Tensor) -> torch.Tensor:
    """Standardises each row by a variance that cancels."""
    mean, square = x.mean(1, keepdim=True), x.square().mean(1, keepdim=True)
    return (x - mean) * torch.rsqrt((square - mean.square()).abs() + 1e-5)


def two_passes(x: torch.Tensor) -> torch.Tensor:
    """The variance of what the mean was taken away from."""
    centred = x - x.mean(1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5)


def off_by(factor: float, x: torch.Tensor) -> torch.Tensor:
    """One pass, and a variance that is off by a factor."""
    mean, square = x.mean(1, keepdim=True), x.square().mean(1, keepdim=True)
    return (x - mean) * torch.rsqrt((square - mean.square()).abs() * factor + 1e-5)


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """Running means, added up in half precision."""
    return (x.half().cumsum(1) / x.shape[1]).float() - 300 * torch.arange(1, 65) / 64


def in_floats(x: torch.Tensor) -> torch.Tensor:
    """The same in float32."""
    return x.cumsum(1) / x.shape[1] - 300 * torch.arange(1, 65) / 64


def in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The same in bfloat16, which is worse than half precision."""
    return (x.bfloat16().cumsum(1) / x.shape[1]).float() - 300 * torch.arange(1, 65) / 64


class Cancelling(nn.Module):
    """A linear layer behind a computation that errs."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor], dropout: float) -> None:
        super().__init__()
        self.compute = compute
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.compute(x)))


def cancelling(compute: Callable[[torch.Tensor], torch.Tensor], dropout: float) -> Iterator[None]:
    """Rows of mean 300 and deviation 1."""
    own = torch.Generator().manual_seed(3)
    data = TensorDataset(300 + torch.randn(74, 64, generator=own), torch.randint(0, 5, (74,), generator=own))
    model = Cancelling(compute, dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for rows, labels in forever(DataLoader(data, batch_size=16, shuffle=True)):
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        yield


def computing(compute: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """The model computes so instead."""
    return within(lambda m: set_meanwhile([(m, "compute", compute)]))


CANCELS, HALVES = partial(cancelling, one_pass), partial(cancelling, in_halves)

CASES: tuple[tuple[str, Callable[[float], Iterator[None]], Plant, str], ...] = (
    ("variance in two passes, the script's in one cancels", CANCELS, computing(two_passes), "agrees"),
    ("sum in float32, the script's in half", HALVES, computing(in_floats), "agrees"),
    ("sum in bfloat16, the script's in half", HALVES, computing(in_bfloat16), "disagrees"),
    ("variance off by 20 %", CANCELS, computing(partial(off_by, 1.2)), "disagrees"),
    ("variance off by 2 %, the script's own error 0.5 %", CANCELS, computing(partial(off_by, 1.02)), ""),
)  # fmt: skip
"""What it is, the script by its dropout, the lever, and what should be said of it; empty where nothing can be."""

DROPOUTS: tuple[Any, ...] = (0.0, 0.3)
