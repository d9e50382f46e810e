"""`prove` as a user types it, on a script that learns in a second; times are never asserted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import warm
from flatout.run import isolation

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent.parent
PROVED = str(ROOT / "tests" / "scripts" / "proved.py")
FLATOUT = [sys.executable, "-m", "flatout"]
HERE = [] if isolation.available() is None else ["--allow-writes"]
ACCURACY = ["--metric", "accuracy: ([0-9.]+)"]

PLANTED = '''"""planted: updates of a fifth of their size, as a lever that harms convergence makes them."""

from typing import ClassVar

from flatout.frameworks.lever import Lever


class Planted(Lever):
    """Learns too slowly."""

    name = "planted"
    summary = "smaller updates"
    class_ = "rounding"
    shortens: ClassVar = ("optimizer",)
    check = "updates"

    def applies(self, facts, machine):
        return None

    def engage(self, session, settings):
        self.rates = [(group, group["lr"]) for one in session.optimizers for group in one.param_groups]
        for group, rate in self.rates:
            group["lr"] = rate / 200

    def release(self, session):
        for group, rate in self.rates:
            group["lr"] = rate

    def evidence(self, session):
        return "updates are smaller"
'''


def prove(*words: str, folder: Path, limit_s: float = 250, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    environment.pop("COLUMNS", None)
    return warm.run(
        [*FLATOUT, "prove", *HERE, *words], cwd=folder, capture_output=True, text=True, timeout=limit_s,
        env=environment, check=False,
    )  # fmt: skip


def num_made(said: str) -> int:
    """Whole runs of which it was told what they came to."""
    return len(re.findall(r"flatout: seed \d+ ", said))


def summary(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def test_an_exact_enough_lever_is_equal_and_leaves_no_file_and_the_proof_goes_on_with_more_seeds(tmp_path):
    words = ("--levers", "fused_optimizer", "--metric-file", "out.json", "--metric", "test.accuracy", "--target", "0.8")
    script = (PROVED, "--metric-file", "out.json", "--epochs", "2")
    done = prove("--json", "--seeds", "3", *words, *script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = summary(done)
    assert found["verdict"] in ("identical", "equivalent") and found["equivalence"]["num_seeds"] == 3
    assert len({run["value"] for run in found["runs"] if run["side"] == "plain"}) > 1, "seeds are different ones"
    assert HERE or not (tmp_path / "out.json").exists()
    assert "6 whole runs left" in done.stderr
    again = prove("--seeds", "4", *words, *script, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "6 runs there already" in again.stderr and again.stderr.count("flatout: seed 3 ") == 2
    assert len(list(tmp_path.glob(".flatout/proved-*"))) == 1


@pytest.mark.smoke
def test_a_lever_that_harms_convergence_is_caught(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    levers = tmp_path / "src" / "flatout" / "frameworks" / "pytorch" / "levers"
    (levers / "planted.py").write_text(PLANTED)
    registry = (levers / "__init__.py").read_text()
    assert "NAMES = (" in registry
    (levers / "__init__.py").write_text(registry.replace("NAMES = (", 'NAMES = (\n    "planted",'))
    done = prove(
        "--levers", "planted", "--seeds", "6", *ACCURACY, PROVED, folder=tmp_path, PYTHONPATH=str(tmp_path / "src")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different: accuracy differs by -0." in done.stdout
    assert "flatout tune --accept exact" in done.stdout


def test_a_script_that_ignores_seeds_is_told_so_and_costs_no_more_runs(tmp_path):
    done = prove("--levers", "fused_optimizer", "--seeds", "5", PROVED, "--fixed", "--epochs", "2", folder=tmp_path)
    assert done.returncode == 6, done.stderr
    assert "the script ignores seeds" in " ".join(done.stdout.split())
    assert num_made(done.stderr) == 4


def test_with_a_seed_option_the_script_seeds_itself(tmp_path):
    done = prove(
        "--json", "--levers", "none", "--seeds", "2", *ACCURACY, "--seed-option=--seed", PROVED, "--epochs", "2",
        folder=tmp_path,
    )  # fmt: skip
    runs = {(run["seed"], run["side"]): run["value"] for run in summary(done)["runs"]}
    assert done.returncode == 6 and "2 of at least 3 seeds" in summary(done)["equivalence"]["reason"]
    for seed in (0, 1):
        words = [sys.executable, PROVED, "--epochs", "2", "--seed", str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        plainly = subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout
        assert float(plainly.split()[-1]) == runs[seed, "plain"] == runs[seed, "plan"]


def children_of(folder: Path) -> list[Path]:
    """Processes of runs in a folder, whoever their parent is by now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FLATOUT_SESSION={folder}".encode() in (process / "environ").read_bytes():
                found.append(process)
    return found


def num_runs(folder: Path) -> int:
    """Whole runs that a proof has kept."""
    return sum(path.read_bytes().count(b'"side"') for path in folder.glob(".flatout/*/runs.jsonl"))


def test_a_proof_that_is_interrupted_and_then_killed_leaves_no_process_and_goes_on_each_time(tmp_path):
    words = [*FLATOUT, "prove", *HERE, "--levers", "none", "--seeds", "3", *ACCURACY, PROVED, "--epochs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    num_kept = 0
    for how in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while num_runs(tmp_path) <= num_kept and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(how)
        said = process.communicate(timeout=60)[1].decode()
        while children_of(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not children_of(tmp_path)
        assert ("there already" in said) == (num_kept > 0)
        num_kept = num_runs(tmp_path)
    again = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "there already" in again.stderr and num_made(again.stderr) == 6 - num_kept < 5
    assert "equal: the same accuracy" in again.stdout and "so is every loss" in " ".join(again.stdout.split())


@pytest.mark.parametrize(
    ("options", "script", "code", "said"),
    [
        (["--metric", "f1: ([0-9.]+)"], [], 4, "no value of `f1` in the first run"),
        (["--metric", r"accuracy: (\w+)"], ["--text"], 4, "`good`, which is no number"),
        (["--metric-file", "o.json", "--metric", "test.accuracy"], ["--metric-file", "o.json", "--half"], 4, "half wr"),
        (ACCURACY, ["--exit", "3"], 3, "ended with exit code 3"),
        (["--metric", "accuracy"], [], 2, "has 0 groups, not one"),
        (["--margin", "0"], [], 2, "is no positive number"),
        (["--margin", "inf"], [], 2, "`--margin inf` is no finite number"),
        (["--target", "nan"], [], 2, "`--target nan` is no finite number"),
        (["--seeds", "0"], [], 2, "leaves nothing to run"),
    ],
)
def test_what_cannot_be_proved_is_an_error_in_three_parts(tmp_path, options, script, code, said):
    done = prove("--levers", "none", *options, PROVED, "--epochs", "2", *script, folder=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert all(f"\n{part}:" in f"\n{done.stderr}" for part in ("error", "cause", "hint"))


def test_without_a_plan_there_is_nothing_to_prove(tmp_path):
    done = prove(PROVED, folder=tmp_path)
    assert done.returncode == 2 and "there is nothing to prove" in done.stderr and "flatout tune" in done.stderr


def test_an_option_behind_the_script_is_found_where_there_is_no_plan(tmp_path):
    done = prove(PROVED, "--levers", "none", folder=tmp_path)
    assert done.returncode == 2 and "`--levers` stood after the script and so went to the script" in done.stderr


def test_a_lever_that_is_not_at_work_proves_nothing_and_costs_one_seed(tmp_path):
    done = prove("--seeds", "4", *ACCURACY, "--levers", "channels_last", PROVED, "--epochs", "1", folder=tmp_path)
    said = " ".join(done.stdout.split())
    assert done.returncode == 6, done.stderr
    assert "nothing was proved: nothing of the plan was at work (channels_last: no 2D or 3D convolution)" in said
    assert num_made(done.stderr) == 2


def test_another_batch_size_is_proved_though_its_runs_have_fewer_steps_and_the_next_command_can_be_typed(tmp_path):
    words = (*ACCURACY, "--seeds", "2", "--target", "0.6", "--levers", "batch_size=64", "--accept", "semantics")
    done = prove(*words, PROVED, "--loader", "--epochs", "4", folder=tmp_path)
    said = " ".join(done.stdout.split())
    assert done.returncode in (0, 1, 6) and "nothing was proved" not in said, done.stderr
    assert "every seed: 64 steps without the plan, 32 with it" in said
    assert "batch_size changes what is trained: only `flatout prove` judges that" in " ".join(done.stderr.split())
    found = json.loads(next((tmp_path / ".flatout").glob("*/runs.jsonl")).read_text().splitlines()[-1])
    assert "idle" not in found or not found["idle"]


def test_runs_of_another_configuration_are_not_held_beside_these(tmp_path):
    (tmp_path / "rate.json").write_text("0.05")
    source = Path(PROVED).read_text()
    (tmp_path / "train.py").write_text(source.replace("\nparser =", "\nopen('rate.json').close()\nparser =", 1))
    words = (*ACCURACY, "--levers", "none", "train.py", "--epochs", "1")
    assert prove("--seeds", "1", *words, folder=tmp_path).returncode == 6
    again = prove("--seeds", "1", *words, folder=tmp_path)
    assert "nothing is left to run" in again.stderr and "2 runs made by an earlier command" in " ".join(
        again.stdout.split()
    )
    (tmp_path / "rate.json").write_text("0.1")
    anew = prove("--seeds", "1", *words, folder=tmp_path)
    assert "earlier runs read other files than there are now, `rate.json`: beginning anew" in anew.stderr
    assert "nothing is left to run" not in anew.stderr
