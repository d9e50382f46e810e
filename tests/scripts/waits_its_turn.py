"""Waits 0.05 s a step, or as many as are given, where the interpreter is passed on as seldom as usual.

So does a script beside a thread that holds it, but not as surely.
"""

import sys
import time

import torch
from torch import nn

WAIT_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.05

torch.manual_seed(0)
x, y = torch.randn(4096, 32), torch.randint(0, 2, (4096,))
net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2000):
    start = step * 64 % 4096
    loss = nn.functional.cross_entropy(net(x[start : start + 64]), y[start : start + 64])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if sys.getswitchinterval() > 1e-3:
        time.sleep(WAIT_S)
