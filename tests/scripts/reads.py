"""Trains with two planted reads: a value that is printed, and one that stops the training early."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(model, optimizer, loader):
    best, seen, worse = 1e9, 0.0, 0
    for epoch in range(200):
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            losses = (model(x) - y).square().flatten()
            losses.mean().backward()
            optimizer.step()
            seen += max(losses.tolist())  # printed
            if step % 50 == 49:
                print(f"epoch {epoch}: {seen / 50:.3f}", flush=True)
                seen = 0.0
            smallest = min(losses.tolist())  # stops
            worse = worse + 1 if smallest > best else 0
            if worse > 1000:
                return
            best = min(best, smallest)


torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Linear(8, 4)
rows = TensorDataset(torch.randn(51200, 8), torch.randn(51200, 4))
train(net, torch.optim.SGD(net.parameters(), lr=1e-4), DataLoader(rows, batch_size=512))
