"""Trains under bf16 as quickly as without it, and for some seconds far slower: `turns.py SECONDS FROM TO`."""

import sys
import time

import torch
from torch import nn

end_s, from_s, to_s = (float(word) for word in sys.argv[1:4])
torch.manual_seed(0)
began_s = time.monotonic()


class Turns(nn.Module):
    """A step of about 4 ms; under autocast 2 ms, or 12 ms in the slow part."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        now_s = time.monotonic() - began_s
        slow = 0.012 if from_s <= now_s < to_s else 0.002
        time.sleep(slow if torch.is_autocast_enabled("cpu") else 0.004)
        return self.layer(x)


model = Turns()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
num_steps = 0
while time.monotonic() - began_s < end_s:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
    num_steps += 1
print(num_steps, "steps")
