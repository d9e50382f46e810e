"""Scripts in which one particular thing happens that the five families do not have.

A model that returns whole numbers, two calls to a loss, a buffer that grows, a momentum on a schedule, a learning rate
that is an integer, a model that turns to double midway. In: a seed. Out: scripts by name, which make one step at a
time, as those of the families do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F


def rows(model: nn.Module, num: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows in the model's type, labelled by the sign of their first number."""
    x = torch.randn(num, 8, dtype=next(model.parameters()).dtype)
    return x, (x[:, 0] > 0).long()


def two_layers(width: int = 2) -> nn.Sequential:
    """A small model."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, width))


class Classes(nn.Module):
    """Returns what it takes for the class of each row, and which of them are more likely than not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = two_layers(12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.body(x)
        return logits, logits.argmax(1), logits > 0


def whole_numbers() -> Iterator[None]:
    """Rows are weighted by what the model takes them for; nothing can be learnt, so that classes are nearly alike."""
    model = Classes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        x, labels = rows(model, 64)[0], torch.randint(0, 12, (64,))
        optimizer.zero_grad()
        logits, classes, likely = model(x)
        weights = 1 + classes % 2 + likely.sum(1) / 12
        (F.cross_entropy(logits, labels, reduction="none") * weights).mean().backward()
        optimizer.step()
        yield


def two_calls() -> Iterator[None]:
    """A loss of what the model makes of two views of each row."""
    model = two_layers(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        x, _ = rows(model)
        optimizer.zero_grad()
        one, other = model(x), model(x + 0.1 * torch.randn_like(x))
        F.cross_entropy(one @ other.T, torch.arange(len(x))).backward()
        optimizer.step()
        yield


class Remembering(nn.Module):
    """Keeps the mean of every batch in a buffer that is longer after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = two_layers()
        self.register_buffer("means", torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.means = torch.cat([self.means, x.mean(0, keepdim=True).detach()])
        return self.body(x + 0.01 * self.means[:-1].sum(0))


def growing_buffer() -> Iterator[None]:
    """A buffer of another shape in each step."""
    model = Remembering()
    return classified(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def classified(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """The usual loop over random rows."""
    while True:
        x, labels = rows(model)
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        after()
        yield


def scheduled_momentum() -> Iterator[None]:
    """OneCycleLR, which moves the momentum against the learning rate."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100_000)
    return classified(model, optimizer, schedule.step)


def whole_rate() -> Iterator[None]:
    """A learning rate of 1, written as an integer."""
    model = nn.Linear(8, 2)
    return classified(model, torch.optim.SGD(model.parameters(), lr=1))


def turning_double() -> Iterator[None]:
    """A model whose parameters are of another type from the tenth step on, which is between two that are kept."""
    model = two_layers()
    yield from itertools.islice(classified(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), 9)
    model.double()
    yield from classified(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


PARTICULAR: dict[str, Callable[[], Iterator[None]]] = {
    "whole numbers": whole_numbers,
    "two calls": two_calls,
    "growing buffer": growing_buffer,
    "scheduled momentum": scheduled_momentum,
    "whole learning rate": whole_rate,
    "turning double": turning_double,
}
