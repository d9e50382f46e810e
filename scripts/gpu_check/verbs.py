"""flatout's commands as a user types them, on scripts that are written for this; what they printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from device import REHEARSAL

HERE = Path(__file__).resolve().parent

HEAD = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
import torch
from torch import nn
from device import DEVICE, REHEARSAL, wait
"""
"""Of a script that trains the models of this check."""


def within(seconds: int) -> list[str]:
    """The budget of a command; in a rehearsal as little as there is."""
    return ["--budget", "5s" if REHEARSAL else f"{seconds}s"]


def flatout(folder: Path, *words: str) -> dict[str, Any]:
    """Run it there; its object is `result`, and its traces are kept beside the lines."""
    begun_s = time.perf_counter()
    command = [sys.executable, "-m", "flatout", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=folder)
    took_s = round(time.perf_counter() - begun_s, 1)
    for trace in () if REHEARSAL else folder.glob(".flatout/*/*.jsonl"):
        with open(Path(os.environ["GPU_CHECK_OUT"], "traces.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"of": words, "file": str(trace.relative_to(folder))}) + "\n")
            file.write(trace.read_text("utf-8", "replace")[:200_000])
    printed = done.stdout.strip()
    found = json.loads(printed) if printed.startswith("{") else {"stdout": printed[-2000:]}
    return {"exit": done.returncode, "wall_s": took_s, "stderr": done.stderr[-2500:], "result": found,
            "ok": done.returncode == 0}  # fmt: skip
