"""Models of blocks whose positions can be divided between layers that are divided by features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.frameworks.pytorch.parallel.sequence_region import Region

from .scenarios import Trained, left
from .tensor_scenarios import Attention, Gated, trained_on_words


class Block(nn.Module):
    """As in LLaMA: norms before, attention and gated layers added."""

    def __init__(self, width: int, num_heads: int, *, packed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.gated = Attention(width, num_heads, packed=packed), Gated(width, 3 * width // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        found: Tensor = x + self.gated(self.second(x))
        return found


class Words(nn.Module):
    """Blocks between words and the same words; `anew`: blocks are computed anew on the way back."""

    def __init__(self, *, anew: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(37, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([Block(16, 4, packed=number % 2 == 0) for number in range(3)])
        self.norm = nn.LayerNorm(16)
        self.anew = anew

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.anew else block(h)
        return F.linear(self.norm(h), self.words.weight)


class Translation(nn.Module):
    """PyTorch's encoder and decoder."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(29, 16)
        self.both = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        source, target = self.words(x), self.words(y)
        if not self.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        found: Tensor = self.both(source, target, tgt_mask=later)
        return F.linear(found if self.batch_first else found.transpose(0, 1), self.words.weight)


def blocks_of_words() -> Trained:
    """Sequences of one length, and of others later: shorter than there are ranks, too."""
    torch.manual_seed(5)
    return trained_on_words(Words(), [12, 12, 11, 1, 13, 12])


def blocks_computed_anew() -> Trained:
    """Each block is computed anew on the way back."""
    torch.manual_seed(5)
    return trained_on_words(Words(anew=True), [12, 12, 11, 13])


def _translation(*, batch_first: bool) -> Trained:
    torch.manual_seed(6)
    model, generator = Translation(batch_first=batch_first), torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    said: list[Any] = []
    for _ in range(5):
        x, y = (torch.randint(0, 29, (4, length), generator=generator) for length in (24, 13))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, y[:, :-1]).flatten(0, 1), y[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        said.append(round(loss.item(), 4))
    return left(said, model)


def translation() -> Trained:
    """Samples are the first dimension."""
    return _translation(batch_first=True)


def translation_with_samples_second() -> Trained:
    """Positions are the first dimension."""
    return _translation(batch_first=False)


def dropout_within_blocks() -> Trained:
    """Masks for some positions are a rank's own."""
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.3, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    said: list[Any] = []
    for _ in range(4):
        x = torch.randn(3, 8, 16)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        said.append(loss.item())
    return left(said, model)


def paths_that_are_dropped() -> Trained:
    """Noise of a model's own, one number for each sample: cutting positions would drop half of a path."""

    class Dropping(Block):
        def forward(self, x: Tensor) -> Tensor:
            kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7)
            found: Tensor = x + kept * (Block.forward(self, x) - x)
            return found

    torch.manual_seed(8)
    model = Words()
    model.blocks[1] = Dropping(16, 4, packed=True)
    return trained_on_words(model, [12, 12, 12])


def blocks_that_are_divided() -> Trained:
    """Tells in how many blocks positions are divided."""
    num_blocks: list[Any] = []
    settle = Region.settle

    def settled(region: Region) -> None:
        num_blocks.append(len(region.blocks))
        settle(region)

    Region.settle = settled  # type: ignore[method-assign]  this process ends with the scenario
    blocks_of_words()
    return Trained(num_blocks, [], 0.0)


SAME = (
    blocks_of_words, blocks_computed_anew, translation, translation_with_samples_second, paths_that_are_dropped,
)  # fmt: skip
