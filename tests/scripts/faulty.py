"""Trains with dropout and batch statistics; a lever of flatout breaks as it engages, in a step or as it is released.

`faulty.py [PLACE [STEPS]]`; without flatout, and without a place, nothing breaks. The end of the run is printed.
"""

import sys

import torch
from torch import nn

place = sys.argv[1] if len(sys.argv) > 1 else "nowhere"
num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 400


def plant():
    """Break the lever bf16, where flatout is in this process."""
    try:
        from flatout.frameworks.pytorch.levers import bf16
    except ImportError:
        return
    if place == "engage":
        bf16.Bf16.engage = broken
    elif place == "release":
        release = bf16.Bf16.release
        bf16.Bf16.release = lambda self, session: release(self, session) or broken()
    elif place in ("first call", "later call", "memory", "backward"):
        whole, calls = bf16._around, []

        def around(call, device, seen):
            inner = whole(call, device, seen)

            def breaks(compute, args, kwargs):
                calls.append(None)
                out = inner(compute, args, kwargs)
                if place == "memory" and len(calls) == 3:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                if place == "backward" and len(calls) == 3:
                    out.register_hook(broken)
                elif len(calls) == {"first call": 1, "later call": 30}.get(place):
                    broken()
                return out

            return breaks

        bf16._around = around


def broken(*_):
    raise RuntimeError(f"planted: {place}")


plant()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, x):
        out = self.layers(x)
        if place == "own" and step % 50 == 30:
            raise ValueError("a bad batch")
        return out


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
num_bad = 0
for step in range(num_steps):  # noqa: B007  the model reads it
    optimizer.zero_grad()
    try:
        model(torch.randn(16, 8)).square().mean().backward()
    except ValueError:
        num_bad += 1
    optimizer.step()
total = sum(p.double().abs().sum() for p in (*model.parameters(), *model.buffers()))
print(f"{num_bad} bad, {total.item():.17g}, {torch.rand(()).item():.9g}")
