"""Trains a little and, at step 30, does on one rank (or on all) what a fault does. What it saves, one process saves."""

import os
import pathlib
import resource
import signal
import socket
import sys
import time

import torch
from torch import nn

fault, who = sys.argv[1], sys.argv[2]


def rank():
    """Ranks above 0 write elsewhere: by that alone a script can tell, and only a test would."""
    name = os.readlink("/proc/self/fd/2")
    return int(name.rpartition("-")[2].partition(".")[0]) if "errors-rank" in name else 0


class Lingers:
    """What makes the end of an interpreter long, as a busy machine does."""

    def __del__(self, sleep=time.sleep):
        sleep(7)


def take(lock):
    """A lock of the machine, which is free again when its holder has closed it."""
    while True:
        try:
            return lock.bind(f"\0{__file__}")
        except OSError:
            time.sleep(0.05)


def strike():
    if fault == "raise":
        raise ValueError("planted")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)
    if fault == "memory":
        in_use = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20), resource.RLIM_INFINITY))
        torch.empty(1 << 28)
    if fault == "locks":  # whoever comes first keeps the others out, and waits for them in the model's call
        with socket.socket(socket.AF_UNIX) as lock:
            take(lock)
            model(x).sum().backward()
    if fault == "crossed":
        other(x).sum().backward()  # in the place of the model, which comes after it
    if fault == "linger":
        globals()["lingers"] = Lingers()
    if fault in ("end", "linger"):
        sys.exit(0)
    if fault == "exit":
        time.sleep(0 if rank() else 1)  # rank 0 still saves when others have ended
        torch.save(model.state_dict(), "saved.pt")
        sys.exit(3)


torch.manual_seed(0)
model, other = nn.Linear(8, 4), nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 8)
for step in range(60):
    if fault == "crossed" and step in (5, 50):
        other(x).sum().backward()
    if fault == "late" and step > 20 and rank() == int(who):
        time.sleep(0.05)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: {loss.item():.4f}", flush=True)
    if step == 30 and (who == "all" or rank() == int(who)):
        strike()
torch.save(model.state_dict(), "trained.pt")
print("trained")
