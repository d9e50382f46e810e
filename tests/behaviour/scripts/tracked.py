"""Trains, tells every tracker, writes all over the disk and starts daemons: `tracked.py ADDRESS MARK [--steps N]`.

The trackers are what the real ones are in the one respect that matters here: which variables decide whether something
goes over the network. ADDRESS is where it would go.
"""

import argparse
import os
import socket
import sqlite3
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import torch

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("mark")
parser.add_argument("--steps", type=int, default=0)
arguments = parser.parse_args()
HOME, MARK = Path.home(), arguments.mark
ON = {"1", "true", "yes", "on"}


def variable(name, default=""):
    return os.environ.get(name, default).lower()


def online():
    """Trackers that would send something, as their documentation has it."""
    if variable("WANDB_MODE", "online") in ("online", "shared"):
        yield "wandb"
    if variable("WEAVE_DISABLED") not in ON:
        yield "weave"
    if variable("COMET_AUTO_LOG_DISABLE") not in ON:
        yield "comet"
    if variable("NEPTUNE_MODE", "async") in ("async", "sync"):
        yield "neptune"
    if variable("MLFLOW_TRACKING_URI").startswith(("http", "databricks")):
        yield "mlflow"
    if variable("MLFLOW_REGISTRY_URI").startswith(("http", "databricks")):
        yield "mlflow registry"
    if variable("CLEARML_OFFLINE_MODE") not in ON:
        yield "clearml"
    if variable("DVC_STUDIO_TOKEN") and variable("DVC_STUDIO_OFFLINE") not in ON:
        yield "dvclive"
    if variable("SWANLAB_MODE", "cloud") in ("cloud", "online"):
        yield "swanlab"
    if variable("TRACKIO_SPACE_ID") or variable("TRACKIO_SERVER_URL"):
        yield "trackio"


def resumed():
    """MLflow ends a script that names a run which its store does not have."""
    local = not variable("MLFLOW_TRACKING_URI").startswith("http")
    if local and (variable("MLFLOW_RUN_ID") or "MLFLOW_EXPERIMENT_ID" in os.environ):
        raise LookupError("no such run in the local store")


def send(name):
    host, _, port = arguments.address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{name}\n".encode())


def litter():
    """Everywhere that a script may write to."""
    for place in (Path(), HOME, HOME / ".cache", Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{MARK}-file").write_text("x")
    (Path("elsewhere") / f"{MARK}-through-a-link").write_text("x")
    with sqlite3.connect(HOME / f"{MARK}-runs.db") as base:
        base.execute("create table runs (loss real)")
    base.close()
    block = shared_memory.SharedMemory(create=True, size=1 << 16, name=f"{MARK}-block")
    block.close()
    Path("events.out.tfevents.1").write_bytes(b"x" * 100)  # what TensorBoard's writer does


def daemons():
    """One in a session of its own, one that has dropped its parents."""
    words = [sys.executable, "-S", "-c", "import time; time.sleep(300)", MARK]
    subprocess.Popen(words, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(words[0], words)
        os._exit(0)
    os.wait()


resumed()
for tracker in online():
    send(tracker)
if not arguments.steps:  # a plain run would leave it all
    litter()
    daemons()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step, deadline = 0, time.monotonic() + 200
while step < arguments.steps or (not arguments.steps and time.monotonic() < deadline):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 50 == 0:
        torch.save(model.state_dict(), "last.pt")
