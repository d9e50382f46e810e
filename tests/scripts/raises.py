"""Raises in the place that its argument names, and prints what it catches; `all` catches in every place."""

import logging
import sys
import threading
import traceback

import torch
from torch.utils.data import DataLoader, Dataset

PLACE = sys.argv[1]
NUM_WORKERS = 1 if PLACE == "worker" else 0


class Items(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 60 and PLACE in ("dataset", "worker"):
            raise ValueError("in the dataset")
        return torch.full((4,), index / 64)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.broken = False

    def forward(self, x):
        if self.broken:
            return self.layer(x.double())
        return self.layer(x)


def in_forward():
    model.broken = True
    try:
        return model(torch.ones(1, 4))
    finally:
        model.broken = False


def in_hook():
    def hook(gradient):
        raise ValueError("in a hook of backward")

    out = model(torch.ones(1, 4))
    out.register_hook(hook)
    out.sum().backward()


def in_update():
    def hook(*_):
        raise ValueError("in a hook of the optimizer")

    handle = optimizer.register_step_pre_hook(hook)
    try:
        optimizer.step()
    finally:
        handle.remove()


def in_cause():
    try:
        in_forward()
    except RuntimeError as problem:
        raise ValueError("chained") from problem


def in_group():
    problems = []
    for place in (in_forward, in_hook):
        try:
            place()
        except Exception as problem:
            problems.append(problem)
    raise ExceptionGroup("several", problems)


def in_thread():
    thread = threading.Thread(target=in_forward, name="mine")
    thread.start()
    thread.join()


PLACES = {"forward": in_forward, "hook": in_hook, "update": in_update, "cause": in_cause, "group": in_group}
PLACES["thread"] = in_thread

if PLACE == "before":
    in_cause()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Items(), batch_size=4, num_workers=NUM_WORKERS)
for _ in range(3):
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
print("trained", flush=True)
if PLACE == "all":
    for name, place in PLACES.items():
        print("in", name, file=sys.stderr)
        try:
            place()
        except Exception:
            traceback.print_exc()
            logging.exception("logged")
            print("frames", [frame.name for frame in traceback.extract_tb(sys.exc_info()[2])])
else:
    PLACES[PLACE]()
