"""Trains some hundred steps with what NumPy, PyTorch and enumerations give where Python's own numbers are usual.

`--loader`: images from a DataLoader, a convolution, an embedding and gradients of two batches in an update; without it
a small network and no loader.
"""

import enum
import fractions
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Width(enum.IntEnum):
    HIDDEN = 16


class Kind(str):
    """Some text."""


def plain() -> None:
    inputs = np.array((4,)).prod()
    model = nn.Sequential(nn.Linear(inputs, Width.HIDDEN), nn.Tanh(), nn.Linear(Width.HIDDEN, np.int64(2)))
    model.kind, model.where, model.share = Kind("actor"), Path("here"), fractions.Fraction(1, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=np.float64(1e-3), eps=float(np.float32(1e-5)))
    for update in range(np.int64(400)):
        optimizer.param_groups[0]["lr"] = (1 - np.float64(update) / 400) * 1e-3
        loss = model(torch.randn(np.int64(32), inputs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), np.float32(0.5))
        optimizer.step()
    print(f"loss {loss.item():.6f}")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(np.int64(1), np.int32(4), kernel_size=tuple(np.array([3, 3])), padding=np.int64(1))
        self.words = nn.Embedding(np.int64(10), np.array(8).item() * np.int64(2))
        self.drop = nn.Dropout(np.float32(0.1))
        self.end = nn.Linear(np.int64(4 * 8 * 8) + np.int64(16), np.int64(3))

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen = torch.relu(self.convolution(images)).flatten(1)
        return self.end(self.drop(torch.cat([seen, self.words(words)], 1)))


def with_loader() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), momentum=np.float64(0.9))
    num = np.int64(640)
    items = TensorDataset(torch.randn(num, 1, 8, 8), torch.randint(0, np.int64(10), (num,)), torch.randint(3, (num,)))
    loader = DataLoader(
        items, batch_size=Width.HIDDEN, shuffle=np.bool_(True), num_workers=np.int64(0), pin_memory=0,
        drop_last=True, persistent_workers=np.bool_(False),
    )  # fmt: skip
    for _ in range(np.int64(10)):
        for number, (images, words, wanted) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(images, words), wanted) / np.float64(2)
            loss.backward()
            if (number + 1) % np.int64(2) == 0:
                optimizer.step()
                optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    torch.manual_seed(np.int64(0).item())
    (with_loader if "--loader" in sys.argv else plain)()
