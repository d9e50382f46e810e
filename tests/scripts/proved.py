"""Learns a small regression in a second, and tells its metric in every way that `prove` reads one.

`proved.py [--seed N] [--metric-file FILE] [--half] [--no-seeds] [--fail-under-plan] [--epochs N] [--loader]`
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--metric-file", type=Path)
parser.add_argument("--half", action="store_true", help="stop in the middle of writing the metric")
parser.add_argument("--fixed", action="store_true", help="draw no random number that a seed decides")
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--loader", action="store_true", help="have a DataLoader make the batches")
parser.add_argument("--text", action="store_true", help="print words where the number is expected")
arguments = parser.parse_args()

if not arguments.fixed:
    torch.manual_seed(arguments.seed)
    np.random.seed(arguments.seed)
generator = torch.Generator().manual_seed(7)
features = torch.randn(512, 8, generator=generator)
labels = (features.sin().sum(1) > 0).float()
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
if arguments.fixed:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = torch.utils.data.DataLoader(range(512), batch_size=32, shuffle=True)
rows = []
for epoch in range(arguments.epochs):
    order = np.arange(512) if arguments.fixed else np.random.permutation(512)
    batches = [torch.from_numpy(order[start : start + 32]) for start in range(0, 512, 32)]
    for batch in loader if arguments.loader else batches:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features[batch])[:, 0], labels[batch])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float(((model(features)[:, 0] > 0) == (labels > 0.5)).float().mean())
    rows.append(accuracy)
    print(f"epoch {epoch} accuracy: {'good' if arguments.text else accuracy}", flush=True)
if arguments.metric_file is not None:
    if arguments.metric_file.suffix == ".csv":
        text = "epoch,accuracy\n" + "".join(f"{i},{a}\n" for i, a in enumerate(rows))
    else:
        text = json.dumps({"test": {"accuracy": rows}})
    arguments.metric_file.write_text(text[:-9] if arguments.half else text)
sys.exit(arguments.exit)
