"""Trains a small model beside a thread that polls its inbox without ever sleeping, and so holds the interpreter."""

import queue
import threading

import torch
from torch import nn

inbox: queue.Queue = queue.Queue()


def poll():
    while True:
        try:
            inbox.get_nowait()
        except queue.Empty:
            continue


torch.manual_seed(0)
x = torch.randn(4096, 128)
y = (x[:, :20].sum(1) > 0).long()
net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
threading.Thread(target=poll, name="dashboard", daemon=True).start()
for step in range(300):
    start = step * 64 % 4096
    loss = nn.functional.cross_entropy(net(x[start : start + 64]), y[start : start + 64])
    opt.zero_grad()
    loss.backward()
    opt.step()
