"""Does opening and closing loaders leave a descriptor, a thread, a process or a page behind?

`benchmarks/loader_cycles.py` does so ten thousand times; here it is asked for fewer.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "loader_cycles.py"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num"), [("fused_fetch", 400), ("sample_store", 400), ("virtual_workers", 60)])
def test_cycles_of_loaders_leave_nothing_behind(name, num):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(num), "--only", name],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(json.loads(line)["took_effect"] for line in done.stdout.splitlines())


@pytest.mark.slow
def test_cycles_with_workers_of_ours_leave_nothing_behind():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "40", "--only", "workers 2"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(json.loads(line)["took_effect"] for line in done.stdout.splitlines())
