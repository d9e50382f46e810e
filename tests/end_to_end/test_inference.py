"""Scripts that infer, as a user types them; no timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from end_to_end.test_tune import HERE, run, three_parts
from tiers import some

pytest.importorskip("torch")

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
INFERS, TRAINS_TOO = str(SCRIPTS / "infers.py"), str(SCRIPTS / "trains_and_infers.py")


def test_why_says_what_is_called_and_how_long_calls_take(tmp_path: Path) -> None:
    done = run("why", "--json", "--budget", "10s", *HERE, INFERS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["phases"]) <= {"forward", "garbage", "recorder", "unattributed"}
    assert {"50", "90", "99"} == set(found["latency"]["plain"]["seconds"])
    shown = run("report", folder=tmp_path).stdout
    assert "nothing is trained here" in shown and "calls/s" in shown and "steps" not in shown, shown


@pytest.mark.parametrize("infers", some([True, False], True))
def test_a_training_is_measured_by_its_steps_and_on_request_by_its_calls(infers: bool, tmp_path: Path) -> None:
    words = ["--infer"] if infers else []
    done = run("why", "--json", "--budget", "6s", *words, *HERE, TRAINS_TOO, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["latency"] is not None) is infers


def test_a_run_under_levers_finds_what_plain_finds_and_counts_calls(tmp_path: Path) -> None:
    words = [INFERS, "--calls", "2000"]
    plain = run("run", *words, folder=tmp_path)
    done = run("run", "--levers", "inference_mode,channels_last", *words, folder=tmp_path)
    assert done.stdout == plain.stdout and done.stdout.startswith("found")
    assert "2,000 calls in" in plain.stderr and "2,000 calls in" in done.stderr, done.stderr


def test_calls_that_were_not_seen_are_an_error_that_says_what_is_looked_for(tmp_path: Path) -> None:
    done = run("why", *HERE, INFERS, "--calls", "50", "--without-eval", folder=tmp_path)
    found = three_parts(done.stderr)
    assert done.returncode != 0 and "evaluation mode" in found["cause"] and "--infer" in found["hint"]
