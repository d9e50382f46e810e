"""Is a bottleneck that was planted named? What the diagnosis says of scripts whose fault is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from flatout.machine.read import read_machine
from flatout.run import isolation

pytest.importorskip("torch")

SCRIPT = str(Path(__file__).resolve().parent.parent / "scripts" / "planted.py")
HERE = [] if isolation.available() is None else ["--allow-writes"]


def why(kind: str, folder: Path, start: Any = warm.run, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "flatout", "why", "--json", "--budget", "25s", *HERE, SCRIPT, kind]
    done = start(
        command, cwd=folder, capture_output=True, text=True, timeout=250, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    result = json.loads((folder / found["run"] / "result.json").read_text())
    if (result["foreign_fraction"] or 0.0) > 0.08:
        pytest.skip(f"other processes used {result['foreign_fraction']:.0%} of the CPU")
    return {**found, "evidence": result["diagnosis"]["evidence"], "census": result["census"]}


def test_a_dataset_that_decodes_photographs_is_the_input(tmp_path: Path) -> None:
    found = why("decode", tmp_path, OMP_NUM_THREADS="1")
    assert found["binding"] == "input" and found["bounds"]["free data"] > 3


def test_two_hundred_tiny_layers_are_launch_overhead(tmp_path: Path) -> None:
    found = why("layers", tmp_path, OMP_NUM_THREADS="1")
    assert found["binding"] == "launch overhead" and found["bounds"]["free launches"] > 1.3
    seen = found["profiled"]
    assert seen["busy_s"] + sum(one["seconds"] for one in seen["idle"]) == pytest.approx(seen["step_s"])
    assert {one["name"] for one in seen["parts"]} & {"aten::addmm", "aten::mm"}


def test_a_value_read_back_after_each_layer_is_counted(tmp_path: Path) -> None:
    """On a CPU it waits for nothing, so it binds nothing; that it happens is said."""
    found = why("item", tmp_path, OMP_NUM_THREADS="1")
    assert found["census"]["num_syncs"] >= 200
    assert any("values read back a step" in line for line in found["evidence"])


def test_far_more_threads_than_cores_are_oversubscription(tmp_path: Path) -> None:
    found = why("threads", tmp_path, subprocess.run, OMP_NUM_THREADS=str(8 * read_machine().num_cores))
    assert found["binding"] == "thread oversubscription" and found["bounds"]["threads that fit"] > 1.1


def test_nothing_is_concluded_where_a_step_is_many_times_as_fast_while_it_is_sampled(tmp_path: Path) -> None:
    script = Path(SCRIPT).with_name("waits_its_turn.py")
    command = [sys.executable, "-m", "flatout", "why", "--json", "--budget", "25s", *HERE, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    result = json.loads((tmp_path / found["run"] / "result.json").read_text())
    if (result["foreign_fraction"] or 0.0) > 0.08:
        pytest.skip(f"other processes used {result['foreign_fraction']:.0%} of the CPU")
    assert found["binding"] == "not concluded" and found["bounds"] == {}
    assert "in plain windows and" in found["contradictions"][0] and "sampled" in found["contradictions"][0]


def test_a_thread_that_holds_the_interpreter_is_named_with_its_line(tmp_path: Path) -> None:
    """Beside a thread that never sleeps a step takes 20 ms or 400 ms, and it may be either where it is looked at."""
    script = Path(SCRIPT).with_name("polls.py")
    command = [sys.executable, "-m", "flatout", "why", "--json", "--budget", "20s", *HERE, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    result = json.loads((tmp_path / found["run"] / "result.json").read_text())
    if (result["foreign_fraction"] or 0.0) > 0.08:
        pytest.skip(f"other processes used {result['foreign_fraction']:.0%} of the CPU")
    (thread,) = result["facts"]["busy_threads"]
    assert thread["name"] == "dashboard" and thread["place"] in {f"polls.py:{line}" for line in range(13, 18)}
    assert found["binding"] == "interpreter" and "`dashboard` at `polls.py:" in result["diagnosis"]["sentence"]
    assert found["bounds"]["an interpreter that is passed on at once"] > 1.5


def test_a_read_that_is_printed_and_one_that_stops_the_training_are_named_by_their_lines(tmp_path: Path) -> None:
    script = Path(SCRIPT).with_name("reads.py")
    command = [sys.executable, "-m", "flatout", "why", "--json", "--budget", "25s", *HERE, str(script)]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    lines = {text.rpartition("# ")[2]: number for number, text in enumerate(script.read_text().splitlines(), 1)}
    reads = {site["line"]: site for site in json.loads(done.stdout)["reads"]}
    printed, stops = reads[lines["printed"]], reads[lines["stops"]]
    assert "max(losses.tolist())" in printed["code"] and "min(losses.tolist())" in stops["code"]
    assert printed["waited_s"] > 0 and stops["waited_s"] > 0
    assert {printed["file"], stops["file"]} == {str(script)}
    assert printed["reads_per_step"] == stops["reads_per_step"] == 1


FREEZES = """
import gc
import torch
from torch.utils.data import DataLoader, TensorDataset

gc.disable()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(6400, 8), torch.randn(6400, 1)), batch_size=32, shuffle=True)
num = 0
while True:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        num += 1
        if num == 1:
            gc.collect()
            gc.freeze()
        elif num % 500 == 0:
            gc.collect()
            print("objects", len(gc.get_objects()), flush=True)
"""


def test_what_a_diagnosis_loads_is_there_before_a_script_freezes_its_objects(tmp_path: Path) -> None:
    """Each collection of such a script walks what came later; ten thousand of ours made it a third slower."""
    (tmp_path / "freezes.py").write_text(FREEZES, encoding="utf-8")
    command = [sys.executable, "-m", "flatout", "why", "--budget", "10s", *HERE, "freezes.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    output = next(tmp_path.glob(".flatout/*/output-1.log")).read_text(encoding="utf-8")
    counts = [int(line.split()[1]) for line in output.splitlines() if line.startswith("objects")]
    assert counts and max(counts) < 4000, counts
