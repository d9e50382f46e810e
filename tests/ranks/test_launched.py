"""Ranks that a launcher starts: tuned on one of them alone, measured on all, run under the plan; taken apart."""

from __future__ import annotations

import json
import sys

import pytest

from faulting import REASON, copied, flatout, left_behind

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"trials cannot be isolated here: {REASON}")

LAUNCHER = ("--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copied("loads_on_ranks.py", tmp_path)
    return tmp_path


def test_what_wins_on_one_rank_is_measured_on_all_and_run_under_the_launcher(here):
    words = (*LAUNCHER, "loads_on_ranks.py")
    done = flatout("tune", "--levers", "workers", "--budget", "100s", "--json", *words, limit_s=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    result = json.loads((here / found["run"] / "result.json").read_text())
    assert result["launched"]["num_ranks"] == 2 and result["header"]["world_size"] == 1
    assert result["typed"].startswith("-- ")
    if found["verdict"] == "faster":  # on a busy machine it may stay open
        assert "pair 4" in done.stderr
        ran = flatout("exec", *words)
        assert ran.returncode == 0 and "1 lever from flatout.toml" in ran.stderr
    assert not left_behind(here, "loads_on_ranks.py")
    assert not list((here / found["run"]).glob("sample-*"))


def test_a_script_that_refuses_to_be_alone_is_told(here):
    done = flatout("tune", *LAUNCHER, "loads_on_ranks.py", "--alone-never")
    assert done.returncode != 0 and "one rank of `" in done.stderr and "two ranks are needed" in done.stderr
    assert not left_behind(here, "loads_on_ranks.py")


def test_the_steps_of_all_ranks_are_taken_apart_and_shown_again(here):
    done = flatout("why", "--json", *LAUNCHER, "loads_on_ranks.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2 and found["launched"] and len(found["anatomies"]) == 2
    assert (here / found["run"] / "report.html").exists()
    again = flatout("report")
    assert again.returncode == 0 and "what ranks exchange is within these" in again.stdout
