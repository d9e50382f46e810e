"""`make bench`: every benchmark, one after the other; raw samples go to `results/`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

SCRIPTS = (
    "overhead.py",
    "input_pipeline.py",
    "input_cold.py",
    "speedups.py",
    "watched.py",
    "learned.py",
    "many_ranks.py",
)

if __name__ == "__main__":
    for script in SCRIPTS:
        subprocess.run([sys.executable, str(HERE / script)], check=True)
