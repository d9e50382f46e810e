"""A script with steps of about one millisecond: `millisecond_steps.py NUM_STEPS`."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
