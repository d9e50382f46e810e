"""Makes very many tiny steps and prints how much memory grew between an early one and the last: `many_steps.py N`.

Printed in bytes: what Python and NumPy hold that was allocated by flatout's own lines, and what the process holds.
"""

import gc
import os
import sys
import tracemalloc

import torch
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = int(sys.argv[1])
SETTLED = NUM_STEPS // 10
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
OURS = f"{os.sep}flatout{os.sep}"


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def look():
    gc.collect()
    held = [s.size for s in tracemalloc.take_snapshot().statistics("filename") if OURS in s.traceback[0].filename]
    return sum(held), tracemalloc.get_traced_memory()[0], resident_bytes()


torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(2000, 4)), batch_size=4, shuffle=True)
step = 0
tracemalloc.start()
while step < NUM_STEPS:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        step += 1
        if step == SETTLED:
            before = look()
print("growth", *(now - then for now, then in zip(look(), before, strict=True)))
