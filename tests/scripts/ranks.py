"""Trains on several ranks with gloo, and makes sure that they hold the same parameters in the end."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(others, weights)
sys.stdout.write(f"{rank} {sys.argv[1:]} {all(torch.equal(weights, other) for other in others)}\n")
dist.destroy_process_group()
