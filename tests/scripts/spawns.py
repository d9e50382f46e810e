"""Trains in children: first in one, then in two at once."""

import torch
import torch.multiprocessing


def train(rank, seed):
    torch.manual_seed(seed + rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
    print(seed, rank, loss.item(), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(1,), nprocs=1)
    torch.multiprocessing.spawn(train, args=(5,), nprocs=2)
