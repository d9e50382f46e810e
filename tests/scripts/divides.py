"""Trains a little and writes a file; each sample costs two milliseconds, so that ranks have something to divide."""

import sys
import time

import torch
from torch import nn

torch.manual_seed(0)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x):
        time.sleep(0.002 * len(x))
        return self.inner(x)


model = Slow()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x, y = torch.randn(64, 8), torch.randn(64, 4)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
    i = 16 * (step % 4)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[i : i + 16]), y[i : i + 16])
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
torch.save(model.state_dict(), "trained.pt")
