"""Trains; at step 25 the file that is named first is made, and from step 30 on inputs have another shape."""

import sys
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.drop(self.first(x).relu()))


model = Net()
optimizer = torch.optim.Adam(model.parameters())
total = 0.0
for step in range(50):
    if step == 25:
        Path(sys.argv[1]).touch()
    optimizer.zero_grad()
    loss = model(torch.randn(3 if step < 30 else 5, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    total += loss.item()
print(f"{total:.5f}", *torch.get_rng_state()[:8].tolist())
