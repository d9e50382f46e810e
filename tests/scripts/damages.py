"""Trains, and half-way does to its surroundings what its argument names."""

import resource
import shutil
import sys
import time
from pathlib import Path

import torch

damage = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
deadline = time.monotonic() + 1.0
step = 0
while step < 400 or (damage != "nothing" and time.monotonic() < deadline):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    if step == 60 and damage != "nothing":
        (place,) = Path(".flatout").glob("damages-*")
        if damage == "run folder":
            shutil.rmtree(place)
        elif damage == "trace":
            (place / "trace-run.jsonl").unlink()
            (place / "trace-run.jsonl").mkdir()
        elif damage == "orders":
            (place / "orders-run").unlink()
        elif damage == "file size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    if step == 400:
        print(loss.item(), flush=True)
