"""Trains, and half-way takes away what its argument names; the end of the training is printed.

`starved.py disk` fills the disk that it lies on, `clock` sets the clock of this process to and fro at every look,
`memory` asks for batches of 20 MB.
"""

import itertools
import random
import sys
import time
from pathlib import Path

import torch

what = sys.argv[1]
torch.manual_seed(0)
if what == "clock":
    lots = random.Random(1)
    time.time = lambda: 1.8e9 + lots.uniform(-1e9, 1e9)
    time.time_ns = lambda: int(1e9 * time.time())


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        return torch.full((650_000 if what == "memory" else 4,), float(index % 7))


width = 650_000 if what == "memory" else 4
model = torch.nn.Linear(width, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
begun = time.monotonic()
deadline = begun + (60.0 if what == "endless disk" else 3.5)
filled = not what.endswith("disk")
step = 0
while step < 400 or time.monotonic() < deadline:
    for batch in torch.utils.data.DataLoader(Items(), batch_size=8):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        if not filled and time.monotonic() - begun > 2.5:
            filled = True
            try:
                with open("filler", "wb", buffering=0) as file:
                    for _ in itertools.count():
                        file.write(bytes(4096))
            except OSError as problem:
                print("full:", problem.strerror, flush=True)
        if step == 100:
            print(f"{loss.item():.9g}", flush=True)
        if what == "memory" and step == 100:
            sys.exit(0)
assert Path(__file__).exists()
