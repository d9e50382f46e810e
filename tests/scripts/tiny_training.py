"""A training script of tiny steps, with ways to go wrong: `tiny_training.py [--steps N] [--fail WHERE] ...`."""

import argparse
import os
import signal
import sys
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--fail", choices=["before", "in", "after", "signal", "never-steps", "no-training"])
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--checkpoint", help="write this file at every step")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep in each item")
arguments = parser.parse_args()

torch.manual_seed(0)


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        if arguments.pause:
            time.sleep(arguments.pause)
        return torch.full((64,), float(index % 7)), index % 3


if arguments.fail == "before":
    raise ValueError("planted before training")
if arguments.fail == "no-training":
    print("nothing to train")
    sys.exit(0)
if arguments.fail == "never-steps":
    time.sleep(600)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Items(), batch_size=16, shuffle=True)
step = 0
while step < arguments.steps:
    for items, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(items), labels)
        loss.backward()
        optimizer.step()
        step += 1
        if arguments.checkpoint:
            torch.save(model.state_dict(), arguments.checkpoint)
        if arguments.fail == "in" and step == 40:
            raise ValueError("planted in training")
        if arguments.fail == "signal" and step == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= arguments.steps:
            break
if arguments.fail == "after":
    raise ValueError("planted after training")
print(f"done after {step} steps")
sys.exit(arguments.exit)
