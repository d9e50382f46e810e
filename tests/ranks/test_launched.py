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
    done = flatout("tune", "--levers", "ahead", "--budget", "100s", "--json", *words, limit_s=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    result = json.loads((here / found["run"] / "result.json").read_text())
    assert result["launched"]["num_ranks"] == 2 and result["header"]["world_size"] == 1
    assert result["typed"].startswith("-- ")
    if found["verdict"] == "faster":  # on a busy machine it may stay open
        assert "pair 4" in done.stderr
        ran = flatout("exec", *words)
        assert ran.returncode == 0 and "1 lever from flatout.toml" in ran.stderr
    assert not left_behind(here)
    assert not list((here / found["run"]).glob("sample-*"))


def test_a_script_that_refuses_to_be_alone_is_told(here):
    done = flatout("tune", *LAUNCHER, "loads_on_ranks.py", "--alone-never")
    assert done.returncode != 0 and "one rank of `" in done.stderr and "two ranks are needed" in done.stderr
    assert not left_behind(here)


def test_the_steps_of_all_ranks_are_taken_apart_and_shown_again(here):
    done = flatout("why", "--json", *LAUNCHER, "loads_on_ranks.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2 and found["launched"] and len(found["anatomies"]) == 2
    assert (here / found["run"] / "report.html").exists()
    again = flatout("report")
    assert again.returncode == 0 and "what ranks exchange is within these" in " ".join(again.stdout.split())


SHORT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    if step == 5 and sys.argv[1:] == ["raise"] and os.environ["RANK"] == "1":
        raise ValueError("boom")
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_shell_script_that_extends_the_path_starts_ranks_that_are_reached(here):
    (here / "lib").mkdir()
    (here / "lib" / "theirs.py").write_text("")
    start = " ".join(LAUNCHER[1:])
    (here / "launch.sh").write_text(f'export PYTHONPATH=$PWD/lib:$PYTHONPATH\n{start} "$@"\n')
    (here / "short.py").write_text("import theirs\n" + SHORT)
    done = flatout("exec", "--levers", "threads=1", "--", "bash", "launch.sh", "short.py")
    assert done.returncode == 0 and "2 processes, 60 steps" in done.stderr, done.stderr


def test_a_rank_that_raises_is_the_one_that_is_named(here):
    (here / "short.py").write_text(SHORT)
    done = flatout("why", *LAUNCHER, "short.py", "raise")
    assert done.returncode != 0 and "rank 1: ValueError: boom" in done.stderr, done.stderr
    assert not left_behind(here)


def test_ranks_whose_environment_is_replaced_are_not_said_to_have_failed(here):
    (here / "short.py").write_text(SHORT)
    done = flatout("why", "--", "env", "PYTHONPATH=lib", *LAUNCHER[1:], "short.py")
    assert done.returncode != 0 and "no process that trains was reached" in done.stderr, done.stderr
