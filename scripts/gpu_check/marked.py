"""The tests that are marked `gpu`, each with a line of its own as it ends; this file is their plugin for pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from log import Item

ROOT = Path(__file__).resolve().parents[2]

PLACES = (
    "tests/unit/pytorch/test_transfer.py", "tests/unit/pytorch/test_read_recorder.py",
    "tests/unit/pytorch/test_recorded_graphs.py", "tests/unit/pytorch/test_expandable_segments.py",
    "tests/unit/test_calibration.py", "tests/end_to_end/test_isolation_attacks.py", "tests/ranks/test_on_gpu.py",
)  # fmt: skip


def items() -> list[Item]:
    """One, of all."""
    return [Item("tests", "all pass; where there is no GPU they are skipped", _tests, "CPU: they are skipped")]


def _tests() -> dict[str, Any]:
    told = Path(os.environ["GPU_CHECK_OUT"], "tests.txt")
    told.unlink(missing_ok=True)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["-q", "-m", "gpu", "-p", "marked", "-p", "no:cacheprovider", "--override-ini=addopts="]
    options += ["--import-mode=importlib", "--durations=5"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *PLACES],
        cwd=ROOT, capture_output=True, text=True, timeout=95, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    outcomes = dict(line.rsplit(" ", 1) for line in told.read_text().splitlines())
    return {"outcomes": outcomes, "exit": done.returncode, "stdout": done.stdout[-2500:], "stderr": done.stderr[-1000:],
            "ok": done.returncode == 0 and bool(outcomes)}  # fmt: skip


def pytest_runtest_logreport(report: Any) -> None:
    """A part of a test has ended: what it came to stands on the disk."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        with open(Path(os.environ["GPU_CHECK_OUT"], "tests.txt"), "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid.replace(' ', '_')} {report.outcome}\n")
