"""Steps whose conditions change on the way: `watched_steps.py core|shapes|elsewhere|calm FOLDER`.

core, calm: products that two threads could share, where the script asks for one thread; elsewhere: it asks for two.
shapes: chains of small operations over the pieces of a sequence; from step 500 on each step's sequence has another
number of pieces, for each of which a compiler has to compile anew.

Talks with `watched.py` through FOLDER: writes `change` (JSON: the step and the clock of `time.perf_counter`) at step
500, goes back to how it was once `over` is there, and ends once `stop` is.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

CHANGE_AT = 500
PIECE = 8
what, folder = sys.argv[1], Path(sys.argv[2])


class Pieces(nn.Module):
    """What many public models of sequences are: Python loops over as many pieces as the sequence has."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        state = torch.zeros_like(x[:, :PIECE])
        for piece in x.split(PIECE, dim=1):
            state = torch.tanh(state + piece) * torch.sigmoid(piece) + torch.relu(state).sin() * 0.1
        return self.last(torch.tanh(self.first(state))).mean()


torch.manual_seed(0)
torch.set_num_threads(2 if what == "elsewhere" else 1)
if what == "shapes":
    model = Pieces(64)
    sizes = itertools.cycle(range(3, 40))
    batch = torch.randn(64, 40 * PIECE, 64)
else:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())))
    batch = torch.randn(256, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
changed = False
for step in itertools.count(1):
    if step == CHANGE_AT:
        (folder / "change.draft").write_text(json.dumps({"step": step, "at_s": time.perf_counter()}))
        os.rename(folder / "change.draft", folder / "change")
        changed = what == "shapes"
    if changed and os.path.exists(folder / "over"):
        changed = False
    if os.path.exists(folder / "stop"):
        break
    inputs = batch if what != "shapes" else batch[:, : PIECE * (next(sizes) if changed else 20)]
    optimizer.zero_grad()
    model(inputs).mean().backward()
    optimizer.step()
