"""Train by a library's own loader or loop, and print what depends on every batch and every random number.

`library_loaders.py LIBRARY NUM_WORKERS [FOLDER OF IMAGES]`
"""

import hashlib
import logging
import os
import random
import sys
import tempfile
import warnings

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import vision

LIBRARY, NUM_WORKERS = sys.argv[1], int(sys.argv[2])
seen = hashlib.sha256()


class Rows(Dataset):
    """Rows and classes."""

    def __init__(self, num=240):
        self.x = torch.randn(num, 16, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        return self.x[k] * 2, k % 4


class Named(Rows):
    """The same as dictionaries."""

    def __getitem__(self, k):
        return {"x": self.x[k] * 2, "labels": k % 4}


def look_at(*values):
    for value in values:
        bits = value.detach().contiguous().numpy().tobytes()
        seen.update(bits + str((value.dtype, value.shape, value.stride())).encode())


def show(what):
    states = torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()
    seen.update(repr([hashlib.sha256(states[0]).digest(), *states[1:]]).encode())
    print(what, seen.hexdigest()[:16], flush=True)


def parts(model=None):
    model = model or nn.Linear(16, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, x, y, backward=torch.Tensor.backward):
    look_at(x, y)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()


def torchdata():
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made():
        return StatefulDataLoader(Rows(), batch_size=8, shuffle=True, num_workers=NUM_WORKERS)

    model, optimizer = parts()
    loader = made()
    for epoch in range(2):
        for num, (x, y) in enumerate(loader):
            step(model, optimizer, x, y)
            if epoch and num == 10:
                state = loader.state_dict()
                break
        show(f"epoch {epoch}")
    loader = made()
    loader.load_state_dict(state)
    for x, y in loader:
        step(model, optimizer, x, y)
    show("resumed")


def pytorch_lightning():
    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def training_step(self, batch, _):
            look_at(*batch)
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch, _):
            look_at(*batch)

        def on_train_epoch_end(self):
            show(f"epoch {self.current_epoch}")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    shown = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False}  # fmt: skip
    net = Net()
    loaders = [DataLoader(Rows(), batch_size=8, shuffle=train, num_workers=NUM_WORKERS) for train in (True, False)]
    lightning.Trainer(max_epochs=3, accelerator="cpu", **shown).fit(net, *loaders)
    look_at(net.layer.weight)


def transformers():
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x=None, labels=None):
            look_at(x, labels)
            return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

    net = Net()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=3, per_device_train_batch_size=8, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_num_workers=NUM_WORKERS,
            remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(net, arguments, train_dataset=Named())
        trainer.remove_callback(PrinterCallback)  # it prints seconds
        trainer.train()
    look_at(net.layer.weight)


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=NUM_WORKERS)
    model, optimizer, loader = accelerator.prepare(*parts(), loader)
    for epoch in range(3):
        for x, y in loader:
            step(model, optimizer, x, y, accelerator.backward)
        show(f"epoch {epoch}")


def timm():
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", sys.argv[3]), (3, 32, 32), 4, is_training=True, use_prefetcher=False,
        num_workers=NUM_WORKERS, persistent_workers=False,
    )  # fmt: skip
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    model, optimizer = parts(net)
    for epoch in range(3):
        for x, y in loader:
            step(model, optimizer, x, y)
        show(f"epoch {epoch}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    vision.torchvision()  # which some of them import
    globals()[LIBRARY]()
    show("end")
