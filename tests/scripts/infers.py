"""Calls a small model, in evaluation mode or not, beside a training or alone."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--calls", type=int, default=100_000)
parser.add_argument("--without-eval", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10))
if not args.without_eval:
    net.eval()
images, found = torch.randn(16, 1, 1, 28, 28), torch.zeros(10, dtype=torch.long)
with torch.no_grad():
    for number in range(args.calls):
        found[net(images[number % 16]).argmax()] += 1
print("found", *found.tolist())
