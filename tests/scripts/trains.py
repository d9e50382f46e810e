"""Trains a little and prints all that one could notice of an observer; everything is deterministic."""

import atexit
import copy
import hashlib
import inspect
import io
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import warnings

import torch
from torch.utils.data import DataLoader, Dataset

SHOW = "import os, sys; print(list(os.environ.items()), sys.path)"


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 0:
            print("worker", list(os.environ.items()), sys.path, flush=True)
        x = torch.full((4,), index / 64)
        return x, x.square().sum(0, keepdim=True)


class Model(torch.nn.Module):
    """The script's own class."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


def digest(value):
    return hashlib.sha256(value).hexdigest()[:16]


def look(when, model=None, optimizer=None):
    print("--", when)
    print(
        "threads",
        [t.name for t in threading.enumerate() if "Queue" not in t.name],
        "handlers",
        signal.getsignal(signal.SIGINT),
    )
    print("environ", list(os.environ.items()))
    print("path", sys.path, "argv", sys.argv, "flags", sys.flags.optimize)
    print("torch", type(torch.__loader__).__name__, type(torch.__spec__).__name__, torch.__spec__.origin)
    print("subprocess", type(subprocess.__spec__).__name__, inspect.signature(subprocess.run))
    print("warnings", len(warnings.filters), "logging", logging.getLogger().handlers, logging.getLogger().level)
    print("random", digest(pickle.dumps(random.getstate())), digest(torch.get_rng_state().numpy().tobytes()))
    print("threads", torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", SHOW], check=True)
    subprocess.run([sys.executable, "-c", SHOW], env=dict(os.environ), check=True)
    if model is None:
        return
    print(model, list(model.state_dict()), list(model._forward_hooks), list(model._forward_pre_hooks))
    print(list(optimizer.state_dict()["state"]), optimizer.state_dict()["param_groups"])
    print(inspect.getsource(type(model).forward), type(model), type(optimizer))
    for kept in (pickle.dumps(model), pickle.dumps(optimizer), pickle.dumps(copy.deepcopy(model))):
        print("pickled", b"flatout" in kept)
    file = io.BytesIO()
    torch.save(model, file)
    print("saved", b"flatout" in file.getvalue(), type(torch.load(io.BytesIO(file.getvalue()), weights_only=False)))


if __name__ == "__main__":
    atexit.register(print, "at exit")
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    random.seed(0)
    print("file", __file__, "name", __name__)
    look("before")
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Squares(), batch_size=16, shuffle=True, num_workers=1)
    losses = []
    for epoch in range(int(sys.argv[1])):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        logging.info("epoch %d", epoch)
        if epoch == 4:
            look("while", model, optimizer)
            print("input", input("what? "))
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    look("after", model, optimizer)
    with open("losses.txt", "w") as file:
        print(*losses, sep="\n", file=file)
    print("rest of stdin", repr(sys.stdin.read()))
