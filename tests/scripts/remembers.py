"""Prints whether the peak of its memory use is still the one that it had before training."""

import resource

import torch

big = bytearray(b"x" * 400_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
del big
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >= before)
