"""Models whose layers are divided by features: pairs without an exchange in between, attention by heads, others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .scenarios import Trained, left, trained


class Gated(nn.Module):
    """Two layers whose features are multiplied go into a third, as in LLaMA."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class Attention(nn.Module):
    """Attention as a user writes it; `packed` has queries, keys and values in one layer."""

    def __init__(self, width: int, num_heads: int, *, packed: bool) -> None:
        super().__init__()
        self.num_heads, self.packed = num_heads, packed
        if packed:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.packed:
            q, k, v = self.qkv(x).reshape(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (one(x).view(b, t, self.num_heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return found


class Blocks(nn.Module):
    """Attention of two kinds, gated layers, words that are read past their layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 16)
        self.norm = nn.LayerNorm(16)
        self.parts = nn.ModuleList([Attention(16, 4, packed=True), Attention(16, 4, packed=False), Gated(16, 24)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for part in self.parts:
            h = h + part(self.norm(h))
        return F.linear(h, self.words.weight)


class Masked(nn.Module):
    """PyTorch's attention with masks, whose weights are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(16, 4)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).view(-1, 4, 16).transpose(0, 1)
        length, num = h.shape[:2]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.zeros(num, length, dtype=torch.bool)
        padding[:, -1] = True
        mixed, weights = self.attention(h, h, h, key_padding_mask=padding, attn_mask=later)
        other, _ = self.attention(h, h.flip(0), h, need_weights=False, attn_mask=later.float())
        found: Tensor = self.last((mixed + other + weights.mean()).transpose(0, 1).reshape(-1, 16))
        return found


def trained_on_words(model: nn.Module, lengths: list[int]) -> Trained:
    """One step on six sequences of each length, with clipping, and an evaluation of the same."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam makes much of a gradient of rounding
    said: list[Any] = []
    for length in lengths:
        x = torch.randint(0, 37, (6, length + 1), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            said.append([round(loss.item(), 4), round(model(x).mean().item(), 4)])
    return left(said, model)


def blocks_of_a_user() -> Trained:
    """Packed and separate attention, gated layers, tied words."""
    torch.manual_seed(5)
    return trained_on_words(Blocks(), [8] * 6)


def attention_with_masks() -> Trained:
    """Padding, a mask of positions as numbers and as flags, weights, another key."""
    torch.manual_seed(6)
    return trained(Masked())


SAME = (blocks_of_a_user, attention_with_masks)
