"""Trains, and prints the tracebacks of what it breaks itself: in the model, the data, a closure, a save, backward."""

import sys
import traceback

import torch
from torch.utils.data import DataLoader


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        if self.training and x.sum() > 1e6:
            raise ValueError("too large")
        return self.layer(x)


class Rows(torch.utils.data.Dataset):
    def __init__(self, broken=False):
        self.broken = broken

    def __len__(self):
        return 64

    def __getitem__(self, k):
        if self.broken and k > 30:
            raise KeyError(k)
        return torch.full((4,), float(k))


class Unsaveable:
    def __reduce__(self):
        raise RuntimeError("not to be saved")


def closure():
    raise ArithmeticError("in the closure")


def fetch_all(rows):
    for x in DataLoader(rows, batch_size=4):
        model(x)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
breaks = [
    lambda: model(torch.full((2, 4), 1e7)),
    lambda: model(torch.ones(2, 5)),
    lambda: fetch_all(Rows(broken=True)),
    lambda: torch.save(Unsaveable(), "never.pt"),
    lambda: optimizer.step(closure),
    lambda: torch.ones(1).backward(),
]
for _ in range(int(sys.argv[1])):
    for x in DataLoader(Rows(), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for provoke in breaks:
        try:
            provoke()
        except Exception:
            traceback.print_exc()
