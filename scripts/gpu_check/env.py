"""G0: what is there, how long a cold start takes, and whether isolation and an empty plan leave a script alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from log import Log

TOOLS = ("g++", "nvcc", "nvidia-smi", "unshare", "newuidmap")
FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
PLAIN = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(32, 64, device=device)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item(), device)
"""


def run(log: Log) -> None:
    """All items."""
    log.item("nvidia_smi", _nvidia_smi)
    log.item("versions", _versions)
    log.item("tools", lambda: {name: shutil.which(name) for name in TOOLS})
    log.item("isolation", _isolation)
    log.item("empty_plan", _empty_plan)


def _timed(command: list[str], **more: Any) -> tuple[float, subprocess.CompletedProcess[str]]:
    begun_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **more)
    return round(time.perf_counter() - begun_s, 3), done


def _nvidia_smi() -> dict[str, Any]:
    """Three times, the first with a cold driver: flatout reads the machine's devices with it."""
    times, said = [], ""
    for _ in range(3):
        took_s, done = _timed(["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"])
        times.append(took_s)
        said = done.stdout.strip() or done.stderr.strip()
    return {"cold_s": times[0], "warm_s": times[1:], "said": said, "ok": times[0] < 10}


def _versions() -> dict[str, Any]:
    begun_s = time.perf_counter()
    import torch

    found: dict[str, Any] = {"import_torch_s": round(time.perf_counter() - begun_s, 2), "torch": torch.__version__}
    found |= {"python": sys.version.split()[0], "cores": os.cpu_count(), "cuda": torch.version.cuda}
    found["header"] = Path(f"{sys.base_prefix}/include/python3.12/Python.h").exists()
    if torch.cuda.is_available():
        begun_s = time.perf_counter()
        torch.ones(1, device="cuda").item()
        found |= {"first_kernel_s": round(time.perf_counter() - begun_s, 2), "cudnn": torch.backends.cudnn.version()}
        found |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        found["nodes"] = sorted(str(p) for p in Path("/dev").glob("nvidia*"))
    return found


def _isolation() -> dict[str, Any]:
    from flatout.run import isolation

    refused = isolation.available()
    return {"refused": refused, "ok": refused is None}


def _empty_plan() -> dict[str, Any]:
    """Output and exit code of a script under `flatout run`, against plain Python's."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(textwrap.dedent(PLAIN))
        plain_s, plain = _timed([sys.executable, "train.py"], cwd=folder)
        ours_s, ours = _timed([sys.executable, "-m", "flatout", "run", "train.py"], cwd=folder)
        return {
            "plain_s": plain_s, "flatout_s": ours_s, "plain": (plain.stdout, plain.stderr[-500:], plain.returncode),
            "flatout": (ours.stdout, ours.stderr[-1500:], ours.returncode),
            "ok": plain.stdout == ours.stdout and plain.returncode == ours.returncode,
        }  # fmt: skip
