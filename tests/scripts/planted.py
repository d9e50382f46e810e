"""Trains with one bottleneck planted: `decode`, `layers`, `item` or `threads`."""

import io
import os
import sys

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

KIND = sys.argv[1]


class Photographs(Dataset):
    """Decodes a large JPEG for each item, and keeps a few of its pixels."""

    def __init__(self):
        noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG")
        self.encoded = file.getvalue()

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.encoded)).convert("RGB").resize((8, 8))
        return torch.from_numpy(np.array(image)).flatten().float() / 255, index % 2


class Rows(Dataset):
    def __init__(self, width):
        self.width = width

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((self.width,), index / 4096), index % 2


class ReadingBack(nn.Module):
    """Looks at a value after each layer, as debugging code that was left in does."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.abs().max().item() > 1e6:
                raise ValueError("diverged")
        return x


torch.manual_seed(0)
if KIND == "threads":  # newer PyTorch takes no more from the variable than there are cores; scripts insist
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
dataset, width = (Photographs(), 192) if KIND == "decode" else (Rows(32), 32)
if KIND == "threads":
    dataset, width = Rows(256), 256
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 2))
elif KIND in ("layers", "item"):
    layers = [layer for _ in range(200) for layer in (nn.Linear(32, 32), nn.Tanh())] + [nn.Linear(32, 2)]
    model = ReadingBack(layers) if KIND == "item" else nn.Sequential(*layers)
else:
    model = nn.Linear(width, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=256 if KIND == "threads" else 8)
for _ in range(50):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
