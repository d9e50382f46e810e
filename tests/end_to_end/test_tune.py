"""`tune` and `why` as a user types them, on tiny scripts; no timing is asserted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

import handmade
import warm
from flatout.records import plan_file
from flatout.run import isolation

pytest.importorskip("torch")

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
TINY = str(SCRIPTS / "tiny_training.py")
FLATOUT = [sys.executable, "-m", "flatout"]
REASON = isolation.available()
HERE = [] if REASON is None else ["--allow-writes"]

CACHE = Path(tempfile.gettempdir()) / f"flatout-test-ceilings-{os.getuid()}"
"""Ceilings are measured once for all tests here; they are no part of what is tested."""

needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"trials cannot be isolated here: {REASON}")


def run(*words: str, folder: Path, limit_s: float = 200, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(CACHE), **extra}
    environment.pop("COLUMNS", None)
    return warm.run(
        [*FLATOUT, *words], cwd=folder, capture_output=True, text=True, timeout=limit_s, env=environment, check=False
    )


def three_parts(text: str) -> dict[str, str]:
    return {
        name: rest.strip()
        for line in text.splitlines()
        for name, _, rest in [line.partition(":")]
        if name in ("error", "cause", "hint")
    }


@pytest.fixture(scope="module")
def why(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("why")
    done = run("why", "--json", "--budget", "20s", *HERE, TINY, "--pause", "0.002", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_why_prints_one_json_object_and_nothing_else(why: dict[str, object]) -> None:
    assert set(why) >= {"phases", "binding", "bounds", "steps_per_s", "model_flops_utilization"}


@pytest.mark.smoke
def test_the_phases_that_why_prints_sum_to_the_step(why: dict[str, object]) -> None:
    assert sum(why["phases"].values()) == pytest.approx(1.0, abs=1e-6)
    assert "copy" not in why["phases"], "nothing is copied to a device here, which is not the same as 0"


@pytest.mark.smoke
def test_a_sleep_in_every_item_is_named_as_the_input(why: dict[str, object]) -> None:
    assert why["binding"] == "input"
    assert why["bounds"]["free data"] > 3


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("tune with space")
    words = ["--levers", "ahead,fused_optimizer", "--budget", "40s"]
    done = run("tune", "--json", *words, *HERE, TINY, "--pause", "0.002", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def told(folder: Path, verdict: dict[str, object]) -> str:
    """What was tried and what was not, for whoever must understand a failure."""
    return run("report", "--verbose", Path(str(verdict["run"])).name, folder=folder).stdout


def skip_where_busy(folder: Path, verdict: dict[str, object]) -> None:
    """On a machine that others keep busy flatout refuses to judge, as it should."""
    result = json.loads((folder / str(verdict["run"]) / "result.json").read_text())
    foreign = result["foreign_fraction"]
    if verdict["verdict"] == "inconclusive" and foreign is not None and foreign > 0.08:
        pytest.skip(f"other processes used {foreign:.0%} of the CPU, so nothing could be judged")


@pytest.mark.smoke
def test_tune_finds_processes_for_a_slow_dataset(tuned: tuple[Path, dict[str, object]]) -> None:
    folder, verdict = tuned
    skip_where_busy(folder, verdict)
    assert verdict["verdict"] == "faster", told(folder, verdict)
    assert "ahead" in verdict["levers"]
    assert verdict["ratio_low"] > 1
    assert verdict["break_even_steps"] > 0


@pytest.mark.smoke
def test_run_engages_the_plan_that_tune_wrote(tuned: tuple[Path, dict[str, object]]) -> None:
    folder, verdict = tuned
    skip_where_busy(folder, verdict)
    done = run("run", "--json", "ran.json", TINY, "--pause", "0.002", "--steps", "80", "--exit", "3", folder=folder)
    assert done.returncode == 3
    assert done.stdout == "done after 80 steps\n"
    first, last = done.stderr.strip().splitlines()
    assert first.startswith("flatout: ") and "expected" in first
    assert last.startswith("flatout: ")
    assert set(json.loads((folder / "ran.json").read_text())["levers"]) == set(verdict["levers"])


def test_a_plan_for_another_script_is_not_overwritten(tuned: tuple[Path, dict[str, object]]) -> None:
    folder, verdict = tuned
    skip_where_busy(folder, verdict)
    other = folder / "other.py"
    other.write_text(Path(TINY).read_text())
    before = plan_file.scripts(folder / "flatout.toml")
    assert len(before) == 1
    words = ["--levers", "ahead", "--budget", "25s"]
    done = run("tune", "--json", *words, *HERE, "other.py", "--pause", "0.002", folder=folder)
    assert done.returncode == 0, done.stderr
    assert set(before) <= set(plan_file.scripts(folder / "flatout.toml"))


def test_the_report_of_a_run_is_shown_again(tuned: tuple[Path, dict[str, object]]) -> None:
    folder, verdict = tuned
    done = run("report", "--json", Path(str(verdict["run"])).name, folder=folder)
    assert json.loads(done.stdout)["ratio"] == verdict["ratio"]
    assert (Path(str(verdict["run"])) / "report.html").exists() or (
        folder / str(verdict["run"]) / "report.html"
    ).exists()


@needs_namespaces
def test_nothing_new_lies_in_the_folder_though_the_script_writes_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_text("precious")
    done = run("why", "--json", "--budget", "10s", TINY, "--checkpoint", "mine.pt", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.pt").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".flatout", "mine.pt"]


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["nope.py"], 2, "no such script"),
        (["broken.py"], 3, "line 2 is not valid Python"),
        (["binary.py"], 2, "is not Python"),
        (["script.sh"], 2, "is not Python"),
        (["--budget", "0", TINY], 2, "no time to measure"),
        (["--budget", "soon", TINY], 2, "is no duration"),
        (["--levers", "bf17", TINY], 2, "no such lever"),
        (["-m", "no.such.module"], 3, "failed"),
        ([TINY, "--fail", "before"], 3, "ValueError: planted before training"),
        ([TINY, "--fail", "in"], 3, "ValueError: planted in training"),
        ([TINY, "--fail", "signal"], 3, "killed by SIGKILL"),
        ([TINY, "--fail", "no-training"], 3, "without a training step"),
        (["--start-limit", "6s", TINY, "--fail", "never-steps"], 3, "no training step within 6 s"),
    ],
)
def test_bad_input_gives_an_error_in_three_parts(tmp_path: Path, words: list[str], code: int, error: str) -> None:
    (tmp_path / "broken.py").write_text("import os\nif True print('x')\n")
    (tmp_path / "binary.py").write_bytes(bytes(range(128, 256)) * 4)
    (tmp_path / "script.sh").write_text("#!/bin/sh\npython train.py\n")
    done = run("tune", *HERE, *words, folder=tmp_path)
    parts = three_parts(done.stderr)
    assert set(parts) == {"error", "cause", "hint"}, done.stderr
    assert error in parts["error"] + parts["cause"]
    assert done.returncode == code
    assert done.stdout == ""
    assert not (tmp_path / "flatout.toml").exists()


def test_a_script_of_few_steps_is_started_over_until_enough_is_measured(tmp_path: Path) -> None:
    done = run("why", "--json", "--budget", "15s", *HERE, TINY, "--steps", "60", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps_per_s"] > 0


def test_ctrl_c_leaves_no_child_alive(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLATOUT_TEST_MARK": str(tmp_path)}
    process = subprocess.Popen(
        [*FLATOUT, "tune", *HERE, TINY], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "stopped before there was anything to keep" in said
    assert "\ncause: Ctrl-C came " in said and "\nhint:  " in said
    mark = f"FLATOUT_TEST_MARK={tmp_path}".encode()
    left = [p for p in Path("/proc").glob("[0-9]*/environ") if mark in _bytes(p)]
    assert left == []
    assert sorted(p.name for p in (tmp_path / ".flatout").iterdir()) == [".gitignore", "lock"]


def test_a_recheck_that_is_told_to_end_leaves_neither_a_child_nor_its_files(tmp_path: Path) -> None:
    shutil.copy(TINY, tmp_path / "train.py")
    elsewhere = handmade.plan("train.py", machine=replace(handmade.MACHINE, num_cores=512))
    plan_file.write(elsewhere, tmp_path / "flatout.toml")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(CACHE)}
    process = subprocess.Popen(
        [*FLATOUT, "run", "--recheck", *HERE, "train.py"],
        cwd=tmp_path,
        env={**environment, "FLATOUT_TEST_MARK": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob(".flatout/*/trace-1.jsonl")):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.1)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and "here first, a minute or two" in said
    mark = f"FLATOUT_TEST_MARK={tmp_path}".encode()
    assert [p for p in Path("/proc").glob("[0-9]*/environ") if mark in _bytes(p)] == []
    assert sorted(p.name for p in (tmp_path / ".flatout").iterdir()) == [".gitignore", "lock"]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_two_measurements_in_one_folder_do_not_run_at_once(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [*FLATOUT, "why", *HERE, TINY], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        time.sleep(6)
        second = run("why", *HERE, TINY, folder=tmp_path)
    finally:
        first.send_signal(signal.SIGINT)
        first.wait(timeout=60)
    assert second.returncode == 2
    assert "another flatout is measuring" in second.stderr


def test_plain_can_be_sent_through_all_of_it_as_if_it_were_a_lever(tmp_path):
    done = run("tune", "--levers", "none", "--budget", "40s", *HERE, TINY, "--pause", "0.002", folder=tmp_path)
    assert done.returncode in (0, 5), done.stderr
    assert "plain against itself" in " ".join(done.stdout.split())
    assert not (tmp_path / "flatout.toml").exists()
    found = json.loads(next(tmp_path.glob(".flatout/*/result.json")).read_text())
    assert found["remeasured"]["levers"] == {} and found["plan"] is None
    first = found["remeasured"]["candidate_first"]
    assert len(first) == found["remeasured"]["num_pairs"]  # none where others kept the machine busy
