"""Models to measure: products, a transformer, a residual network. Out: a step of training, and the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from device import DEVICE, REHEARSAL, SHRINK
from torch import nn
from torch.utils.checkpoint import checkpoint


class Trained(NamedTuple):
    """A loop, a step at a time."""

    step: Callable[[], object]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def trained(
    model: nn.Module, loss: Callable[[], torch.Tensor], optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> Trained:
    """Its usual loop."""
    made = optimizer(model.parameters(), lr=1e-5)

    def step() -> None:
        made.zero_grad()
        loss().backward()
        made.step()

    return Trained(step, model, made)


def mlp(width: int, depth: int, batch: int, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Trained:
    """Linear layers and GELU, float32."""
    torch.manual_seed(0)
    if REHEARSAL:
        width, depth, batch = max(16, width // SHRINK), min(depth, 8), max(4, batch // SHRINK**2)
    model = nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]).to(DEVICE)
    x = torch.randn(batch, width, device=DEVICE)
    return trained(model, lambda: model(x).square().mean(), optimizer)


class Attention(nn.Module):
    """Causal self-attention by PyTorch's own function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) to the same."""
        batch, context, width = x.shape
        q, k, v = (t.view(batch, context, self.heads, -1).transpose(1, 2) for t in self.inputs(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outputs(mixed.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """A transformer's block, whose script may compute it anew in the backward pass."""

    def __init__(self, width: int, *, again: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.again = again
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, max(1, width // 64))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) to the same."""
        return checkpoint(self.mix, x, use_reentrant=False) if self.again else self.mix(x)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def gpt(
    *, width: int = 512, context: int = 512, batch: int = 8, vocabulary: int = 2000, depth: int = 2, again: bool = False
) -> Trained:
    """Next tokens of random ones."""
    torch.manual_seed(0)
    if REHEARSAL:
        context, batch, vocabulary, width, depth = (
            context // SHRINK,
            2,
            max(64, vocabulary // SHRINK**2),
            64,
            min(depth, 3),
        )
    blocks = [Block(width, again=again) for _ in range(depth)]
    model = nn.Sequential(nn.Embedding(vocabulary, width), nn.Sequential(*blocks), nn.Linear(width, vocabulary))
    model.to(DEVICE)
    tokens = torch.randint(vocabulary, (batch, context + 1), device=DEVICE)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return trained(model, loss)


class Residual(nn.Module):
    """A bottleneck of a residual network."""

    def __init__(self, planes_in: int, planes: int, stride: int) -> None:
        super().__init__()
        shapes = ((planes_in, planes, 1, 1), (planes, planes, 3, stride), (planes, 4 * planes, 1, 1))
        parts: list[nn.Module] = []
        for one, other, size, by in shapes:
            parts += [nn.Conv2d(one, other, size, by, size // 2, bias=False), nn.BatchNorm2d(other), nn.ReLU()]
        self.main = nn.Sequential(*parts[:-1])
        same = planes_in == 4 * planes and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(planes_in, 4 * planes, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, planes, height, width) to the like."""
        return nn.functional.relu(self.main(x) + self.shortcut(x))


def resnet(*, depths: tuple[int, ...] = (3, 4, 6, 3), batch: int = 128) -> Trained:
    """Bottlenecks as many as ResNet-50 has, on random images."""
    torch.manual_seed(0)
    size = 224
    if REHEARSAL:
        depths, batch, size = (1, 1), 2, 32
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    planes_in = 64
    for number, depth in enumerate(depths):
        for at in range(depth):
            parts.append(Residual(planes_in, 64 << number, 2 if number and not at else 1))
            planes_in = 4 * (64 << number)
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(planes_in, 1000)).to(DEVICE)
    images, labels = torch.randn(batch, 3, size, size, device=DEVICE), torch.randint(1000, (batch,), device=DEVICE)
    return trained(model, lambda: nn.functional.cross_entropy(model(images), labels), torch.optim.SGD)
