"""Five families of training scripts, each small enough for a step of a few milliseconds, as a user might write them.

Each is a generator that makes one step at a time and never ends. In: a seed. Out: steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


def seed_all(number: int) -> None:
    """Every generator begins alike."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def forever(loader: DataLoader) -> Iterator:
    """Epoch after epoch."""
    while True:
        yield from loader


class Pictures(Dataset):
    """Images as bytes, made into floats item by item; the last batch of a pass is smaller."""

    def __init__(self, num: int, channels: int, size: int, classes: int) -> None:
        own = torch.Generator().manual_seed(7)
        self.labels = torch.randint(0, classes, (num,), generator=own)
        prototypes = torch.randint(0, 256, (classes, channels, size, size), generator=own)
        noise = torch.randint(-60, 60, (num, channels, size, size), generator=own)
        self.images = (prototypes[self.labels] + noise).clamp(0, 255).to(torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index].float() / 255, self.labels[index]


def text(num: int, length: int, vocabulary: int) -> TensorDataset:
    """Rows of tokens, each followed by the one after it."""
    own = torch.Generator().manual_seed(7)
    start = torch.randint(0, vocabulary, (num, 1), generator=own)
    stride = torch.randint(1, 4, (num, 1), generator=own)
    tokens = (start + stride * torch.arange(length + 1)) % vocabulary
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


# -- convolutions --------------------------------------------------------------------------------------------------


class LeNet(nn.Module):
    """Two convolutions, two linear layers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.hidden, self.dropout, self.head = nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(self.body(x), 1)
        return self.head(self.dropout(F.relu(self.hidden(x))))


def lenet() -> Iterator[None]:
    """SGD with momentum and weight decay, gradients clipped by norm."""
    loader = DataLoader(Pictures(74, 1, 12, 5), batch_size=16, shuffle=True)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for images, labels in forever(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield


class Block(nn.Module):
    """Two convolutions with batch statistics around a shortcut; the last scale is zero at first."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inside, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


class ResNet(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


def resnet() -> Iterator[None]:
    """Nesterov momentum, label smoothing; convolutions whose bias statistics take away again."""
    loader = DataLoader(Pictures(74, 3, 12, 5), batch_size=16, shuffle=True)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for images, labels in forever(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
        yield


# -- sequences -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention and a feed-forward part, before each a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Two layers, the embedding tied to the head."""

    def __init__(self, vocabulary: int = 29, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.layers = nn.Sequential(Layer(width, 4), Layer(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * 0.3 + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(x)))


def gpt() -> Iterator[None]:
    """AdamW with groups of weight decay, clipped gradients, dropout."""
    loader = DataLoader(text(75, 12, 29), batch_size=8, shuffle=True)
    model = Gpt()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for tokens, following in forever(loader):
        logits = model(tokens)
        loss = F.cross_entropy(logits.reshape(-1, 29), following.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield


class Tagger(nn.Module):
    """Embedding, LSTM, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 12)
        self.lstm, self.dropout = nn.LSTM(12, 16, num_layers=2, batch_first=True, dropout=0.1), nn.Dropout(0.1)
        self.head = nn.Linear(16, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.embed(tokens))
        return self.head(self.dropout(out))


def lstm() -> Iterator[None]:
    """Adam, gradients accumulated over two batches and clipped."""
    loader = DataLoader(text(75, 10, 29), batch_size=8, shuffle=True)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-3)
    for number, (tokens, following) in enumerate(forever(loader), 1):
        logits = model(tokens)
        (F.cross_entropy(logits.transpose(1, 2), following) / 2).backward()
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            yield


# -- generative ----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Mean and spread of a latent."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, spread = self.out(F.softplus(self.norm(self.hidden(x)))).chunk(2, 1)
        return mean + torch.randn_like(mean) * (spread / 2).exp(), mean, spread


def vae() -> Iterator[None]:
    """Encoder and decoder, each with its optimizer, noise drawn in the model, a loss by hand."""
    loader = DataLoader(Pictures(74, 1, 8, 5), batch_size=16, shuffle=True)
    encoder = Encoder()
    decoder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 64))
    optimizers = [
        torch.optim.Adam(encoder.parameters(), lr=1e-3),
        torch.optim.RMSprop(decoder.parameters(), lr=1e-3, momentum=0.5, weight_decay=1e-2),
    ]
    for images, _ in forever(loader):
        flat = images.flatten(1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        latent, mean, spread = encoder(flat)
        loss = F.binary_cross_entropy_with_logits(decoder(latent), flat, reduction="sum")
        loss = loss - 0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum()
        (loss / len(flat)).backward()
        torch.nn.utils.clip_grad_value_([*encoder.parameters(), *decoder.parameters()], 0.2)
        for optimizer in optimizers:
            optimizer.step()
        yield


FAMILIES: dict[str, Callable[[], Iterator[None]]] = {
    "lenet": lenet,
    "resnet": resnet,
    "gpt": gpt,
    "lstm": lstm,
    "vae": vae,
}
