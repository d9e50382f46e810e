"""G4: what a user types on the first day: `why` and `tune` of scripts that keep the device busy, or do not."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from log import Log

HEAD = """
import torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
"""
BOUND = """
width, batch = (4096, 8192) if device == "cuda" else (256, 64)
model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for epoch in range(100):
    total = 0.0
    for step in range(50):
        x = torch.randn(batch, width).to(device) if {blocking} else torch.randn(batch, width, device=device)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        {read}
    print(epoch, float(loss))
"""
SCRIPTS = {
    "no_read": HEAD + BOUND.format(blocking=False, read="pass"),
    "item": HEAD + BOUND.format(blocking=False, read="total += loss.item()"),
    "blocking_copy": HEAD + BOUND.format(blocking=True, read="pass"),
}


WHY = ["why", "--budget", "20s"]
TUNE = ["tune", "--budget", "50s"]


def run(log: Log) -> None:
    """All items."""
    for name, script in SCRIPTS.items():
        log.item(f"why_{name}", lambda name=name, script=script: _flatout(log, name, script, WHY))
    log.item("tune_no_read", lambda: _flatout(log, "tune_no_read", SCRIPTS["no_read"], TUNE))


def _flatout(log: Log, name: str, script: str, verb: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        begun_s = time.perf_counter()
        command = [sys.executable, "-m", "flatout", *verb, "--json", "train.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=folder)
        took_s = round(time.perf_counter() - begun_s, 1)
        for trace in Path(folder, ".flatout").rglob("*.jsonl"):
            with open(log.out / "traces.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"of": name, "file": str(trace.relative_to(folder))}) + "\n")
                file.write(trace.read_text("utf-8", "replace")[:200_000])
        found = json.loads(done.stdout) if done.stdout.strip().startswith("{") else {"stdout": done.stdout[-2000:]}
        return {"exit": done.returncode, "wall_s": took_s, "stderr": done.stderr[-2500:], "result": found,
                "ok": done.returncode == 0}  # fmt: skip
