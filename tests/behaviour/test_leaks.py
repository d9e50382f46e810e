"""Over very many steps flatout takes no more memory: what it holds, and what the process holds beside plain."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "many_steps.py"
NUM_STEPS = "20000"
OURS_BYTES = 2**20
"""So much may our own lines have allocated and kept, between an early step and the last."""

PROCESS_BYTES = 4 * 2**20
"""The process as a whole is counted in pages, of which allocators keep some: a leak of 230 bytes a step is seen."""


def growth(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    ours, python, process = map(int, re.search(r"^growth (-?\d+) (-?\d+) (-?\d+)$", done.stdout, re.M).groups())
    return ours, python, process


@pytest.mark.parametrize("levers", ["", "threads=1"])
def test_twenty_thousand_steps_take_no_memory_of_ours(levers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--levers", levers) if levers else ()
    ours, python, process = growth(
        sys.executable, "-m", "flatout", "run", "-q", *options, str(SCRIPT), NUM_STEPS
    )  # windows, their records and looks at the plan are in it
    assert ours < OURS_BYTES
    assert python < OURS_BYTES
    assert process < PROCESS_BYTES
