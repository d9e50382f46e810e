"""Runs that are started and stopped at once leave nothing; `benchmarks/start_stop.py` does it a thousand times."""

import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from faulting import CEILINGS, FLATOUT, HERE, copied, environment, flatout, left_behind, parts

pytest.importorskip("torch")

PLACE = Path(__file__).parents[2] / "benchmarks" / "start_stop.py"


@pytest.fixture(scope="module")
def start_stop():
    spec = importlib.util.spec_from_file_location("start_stop", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runs_that_are_stopped_at_any_moment_end_by_that_signal_and_leave_nothing(start_stop):
    found = start_stop.run(20, 2)
    assert found["odd"] == [] and found["left"] == []
    assert sum(found["ends"].values()) == 20


@pytest.mark.smoke
@pytest.mark.parametrize("code", [0, 1, 3, 999])
def test_another_end_is_found(start_stop, code):
    assert not start_stop.ends_in_its_way(code, signal.SIGTERM, "")


@pytest.mark.smoke
def test_what_is_left_is_found(start_stop, tmp_path):
    (tmp_path / "temporary").mkdir()
    assert start_stop.left(tmp_path) == []
    os.mkfifo(tmp_path / "orders-run")
    (tmp_path / "temporary" / "flatout-x").mkdir()
    assert len(start_stop.left(tmp_path)) == 2


def test_of_two_measurements_in_one_folder_the_second_is_refused_and_the_first_goes_on(folder):
    copied("tiny_training.py", folder)
    words = ["tune", *HERE, "--budget", "10s", "--levers", "none", "tiny_training.py"]
    first = subprocess.Popen(
        [*FLATOUT, *words], env=environment(XDG_CACHE_HOME=str(CEILINGS)), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(folder.glob(".flatout/*/session-1.json")):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    second = flatout(*words)
    assert second.returncode == 2 and set(parts(second.stderr)) == {"error", "cause", "hint"}
    assert f"(process {first.pid})" in parts(second.stderr)["error"]
    said = first.communicate(timeout=120)[1]
    assert first.returncode == 0, said
    assert len(list(folder.glob(".flatout/*/result.json"))) == 1
    assert left_behind(folder) == []
