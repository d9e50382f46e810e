"""Sets up as scripts do that know of one process: folders made once, a file fetched and written, a server asked."""

import os
import sys
import time
import urllib.request

os.makedirs("runs/first")  # raises where it exists
if not os.path.exists("cache"):
    time.sleep(0.2)
    os.mkdir("cache")
if not os.path.exists("data.txt"):
    numbers = urllib.request.urlopen(sys.argv[1]).read().decode().split()
    with open("data.txt", "w") as file:
        for number in numbers:
            file.write(number + "\n")
            file.flush()
            time.sleep(0.01)

import torch  # noqa: E402
from torch import nn  # noqa: E402

with open("data.txt") as file:
    data = torch.tensor([float(line) for line in file]).view(-1, 4)
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for step in range(8):
    optimizer.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    with open("runs/first/log.csv", "a") as file:
        file.write(f"{step},{loss.item():.3f}\n")
    torch.save(model.state_dict(), "runs/first/last.pt")
    model.load_state_dict(torch.load("runs/first/last.pt"))
with open("runs/first/log.csv") as file:
    print(len(file.readlines()), "lines")
