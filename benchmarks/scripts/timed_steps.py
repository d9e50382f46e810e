"""Steps that time themselves: `timed_steps.py smallest|millisecond NUM_EPOCHS [AFTER_S]` prints the seconds of one.

Of the fastest epoch, since whatever disturbs only ever adds; of those that begin after so many seconds of steps.
"""

import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
if sys.argv[1] == "smallest":
    model, shape = nn.Linear(2, 1), (500, 2)
else:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    shape = (500, 64, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(list(torch.randn(*shape)), batch_size=None)
best_s = float("inf")
left, after_s = int(sys.argv[2]), time.perf_counter() + float(sys.argv[3] if len(sys.argv) > 3 else 0)
while left:
    begun_s = time.perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    if begun_s >= after_s:
        left -= 1
        best_s = min(best_s, (time.perf_counter() - begun_s) / len(loader))
print(best_s)
