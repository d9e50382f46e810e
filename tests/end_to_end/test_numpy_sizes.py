"""Are scripts whose sizes, rates and switches are NumPy's measured and run like all others? No timing is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.records import trace_file
from flatout.records.facts import Facts
from flatout.records.trace import Failure, Window
from flatout.run import isolation

pytest.importorskip("torch")

SCRIPT = str(Path(__file__).resolve().parent.parent / "scripts" / "numpy_sizes.py")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
HERE = [] if isolation.available() is None else ["--allow-writes"]


def flatout(*words: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *words], cwd=folder, capture_output=True, text=True, timeout=250, check=False,
        env=ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", [(), ("--loader",)])
def test_why_says_what_binds(tmp_path: Path, words: tuple[str, ...]) -> None:
    found = json.loads(flatout("why", "--json", "--budget", "10s", *HERE, SCRIPT, *words, folder=tmp_path))
    assert found["binding"] and found["steps_per_s"] > 0


def test_tune_tries_a_lever(tmp_path: Path) -> None:
    found = flatout("tune", "--json", "--budget", "15s", "--levers", "threads", *HERE, SCRIPT, folder=tmp_path)
    assert json.loads(found)["verdict"]


@pytest.mark.parametrize("words", [(), ("--loader",)])
def test_a_run_has_the_scripts_lines_and_a_record(tmp_path: Path, words: tuple[str, ...]) -> None:
    plain = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True, env=ONE_THREAD)
    assert flatout("run", SCRIPT, *words, folder=tmp_path) == plain.stdout
    (trace,) = tmp_path.glob(".flatout/*/trace-run.jsonl")
    kinds = {type(record) for record in trace_file.Reader(trace)}
    assert {Facts, Window} <= kinds and Failure not in kinds
