"""Ranks that wait for their data: each item takes a while, and a launcher starts who trains (`torchrun`).

Ranks read their numbers from the environment, as `torch.distributed` does; `--alone-never` wants two of them.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Items(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((16,), float(index % 7)), torch.tensor([float(index % 3)])


dist.init_process_group("gloo")
if "--alone-never" in sys.argv and dist.get_world_size() < 2:
    raise SystemExit("two ranks are needed")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
items = Items()
sampler = DistributedSampler(items, seed=0)
for epoch in range(40):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(items, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(epoch, f"{loss.item():.6g}", flush=True)
dist.destroy_process_group()
