"""G0: what is there, how long a cold start takes, and whether isolation and an empty plan leave a script alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from log import Item

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
INSIDE = """
import json, os, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
total = torch.ones(1000, device=device).sum().item()
print(json.dumps({"device": device, "sum": total, "shm_inside": os.stat("/dev/shm").st_dev}))
"""


def items() -> list[Item]:
    """In this order."""
    return [
        Item("nvidia_smi", "answers within 10 s, cold", _nvidia_smi, cannot="there is no driver to ask"),
        Item("versions", "noted, with what a cold start takes", _versions),
        Item("tools", "which compilers are there", lambda: {name: shutil.which(name) for name in TOOLS}),
        Item("isolation", "is available, and a GPU computes in it; /dev/shm noted", _isolation),
        Item("empty_plan", "`run --fixed -q`: stdout, stderr and exit code are plain Python's", _empty_plan),
    ]


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
    begun_s = time.perf_counter()  # the first to import it here
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

    if (refused := isolation.available()) is not None:
        return {"refused": refused, "ok": False}
    with tempfile.TemporaryDirectory() as place:
        folder, run = Path(place, "work"), Path(place, "work", "run")
        run.mkdir(parents=True)
        command = isolation.isolate(
            [sys.executable, "-c", INSIDE], folder=folder, script_folder=None, run_folder=run, scratch=run / "scratch"
        )
        took_s, done = _timed(command, cwd=folder)
        isolation.discard(run / "scratch")
    found = json.loads(done.stdout) if done.returncode == 0 else {}
    found |= {"took_s": took_s, "stderr": done.stderr[-1500:], "shm_outside": Path("/dev/shm").stat().st_dev}
    return {
        **found,
        "ok": found.get("sum") == 1000
        and found["device"] == ("cpu" if "GPU_CHECK_REHEARSES" in os.environ else "cuda"),
    }


def _empty_plan() -> dict[str, Any]:
    """A script under `flatout run`, against plain Python."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(textwrap.dedent(PLAIN))
        plain_s, plain = _timed([sys.executable, "train.py"], cwd=folder)
        ours_s, ours = _timed([sys.executable, "-m", "flatout", "run", "--fixed", "-q", "train.py"], cwd=folder)
        return {
            "plain_s": plain_s, "flatout_s": ours_s, "plain": (plain.stdout, plain.stderr[-500:], plain.returncode),
            "flatout": (ours.stdout, ours.stderr[-1500:], ours.returncode),
            "ok": all(getattr(plain, one) == getattr(ours, one) for one in ("stdout", "stderr", "returncode")),
        }  # fmt: skip
