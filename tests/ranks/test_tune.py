"""Short runs on ranks leave nothing, train what one process trains, and a plan has a run go on its ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from faulting import REASON, SCRIPTS, copied, flatout, left_behind, parts, write_plan
from flatout.frameworks.pytorch import levers as pytorch_levers
from flatout.frameworks.pytorch.numerics import trained
from flatout.judge import agreement
from flatout.machine.read import read_machine
from flatout.records import plan_file
from flatout.records.trace import Agreement
from flatout.run import folder
from flatout.run.script import Script
from flatout.trials.short_runs import Setting, Wanted, take
from flatout.trials.terms import Terms

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def setting(path, *arguments):
    return Setting(
        script=Script(path=path, arguments=arguments), registry=pytorch_levers.registry(),
        run_folder=folder.new(Path.cwd(), "train"), terms=Terms(), machine=read_machine(),
    )  # fmt: skip


def test_a_sample_on_ranks_trains_what_one_process_trains_and_leaves_nothing(here):
    copied("divides.py", here)
    common = setting("divides.py")
    wanted = [Wanted(num_steps=16, keeps=True), Wanted(num_steps=16, keeps=True, nudged=True)]
    wanted += [Wanted(num_steps=16, keeps=True, num_ranks=2, mode=mode) for mode in ("replicate", "shard")]
    plain, nudged, *on_ranks = (take(common, one, n, lambda: None) for n, one in enumerate(wanted))
    assert not plain.problem and plain.num_steps == 16 and len(plain.losses) == len(plain.step_s) + 2
    for sample in on_ranks:
        assert not sample.problem and sample.num_steps == 16 and sample.exchanges.num and sample.peak_memory_bytes
        assert sample.step_memory_bytes is None or sample.step_memory_bytes > 0
        found = trained.differences(
            plain.state("last"), nudged.state("last"), sample.state("last"), plain.state("first")
        ) + trained.of_losses(plain.losses, nudged.losses, sample.losses)
        judged = agreement.judge([Agreement(levers={}, differences=found)], "rounding", ("losses", "parameters"))
        assert judged.verdict == "agrees", judged.detail
    for sample in (plain, nudged, *on_ranks):
        sample.forget()
    assert {p.name for p in here.iterdir()} == {"divides.py", ".flatout"}
    assert not list(common.run_folder.iterdir()) or [p.name for p in common.run_folder.iterdir()] == ["compiled"]
    assert not left_behind(here)


def test_a_script_that_is_refused_or_ends_early_is_a_sample_with_its_reason(here):
    (here / "twice.py").write_text(TWICE)
    refused = take(setting("twice.py"), Wanted(num_steps=16, num_ranks=2, mode="replicate"), 0, lambda: None)
    assert "gradients of its gradients" in refused.problem.cause
    copied("divides.py", here)
    short = take(setting("divides.py", "9"), Wanted(num_steps=16), 0, lambda: None)
    assert short.ended and short.num_steps == 9 and short.problem.cause == "it ended after 9 steps"


TWICE = """
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(1000):
    x = torch.ones(16, 8, requires_grad=True)
    out = model(x).square().sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    optimizer.zero_grad()
    (out + g.square().sum()).backward()
    optimizer.step()
"""


def test_a_run_goes_on_the_ranks_of_its_plan_and_other_ranks_are_an_error_before_anything_starts(here):
    shutil.copy(SCRIPTS / "divides.py", here / "divides.py")
    write_plan("divides.py", "ranks=2:replicate")
    done = flatout("run", "divides.py", "40")
    assert done.returncode == 0, done.stderr
    assert "2 ranks, replicate, as the plan says" in done.stderr and "2 ranks, 40 steps" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("39 ") and (here / "trained.pt").exists()
    (here / "trained.pt").unlink()
    before = sorted(here.rglob("*"))
    for num in ("1", "4"):
        done = flatout("run", "--plan", "flatout.toml", "--ranks", num, "divides.py", "40")
        assert done.returncode == 4 and set(parts(done.stderr)) == {"error", "cause", "hint"}
        assert f"is for 2 ranks, not for `--ranks {num}`" in done.stderr and not done.stdout
    assert sorted(here.rglob("*")) == before


@pytest.mark.slow
def test_ranks_that_halve_a_planted_cost_win_and_go_into_the_plan(here):
    copied("divides.py", here)
    done = flatout("tune", "--ranks", "2", "--budget", "4m", "divides.py", limit_s=600)
    assert done.returncode == 0, done.stderr
    assert "ranks=2:replicate" in done.stdout
    assert {p.name for p in here.iterdir()} <= {"divides.py", ".flatout", "flatout.toml"}
    if "faster: " in done.stdout:  # on a busy machine the interval may be too wide, or the time too short
        assert plan_file.read(Path("flatout.toml"), "divides.py").levers["ranks"]["division"].startswith("2:")
    assert not left_behind(here)


def test_why_takes_the_steps_of_each_rank_apart(here):
    copied("divides.py", here)
    done = flatout("why", "--ranks", "2", "--json", "--budget", "10s", "divides.py", "400")
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout)
    assert len(told["anatomies"]) == told["ranks"] == 2
    for one in told["anatomies"]:
        assert {"forward", "backward", "communication"} <= set(one["phases_s"])
        assert sum(one["phases_s"].values()) == pytest.approx(one["step_s"])
    assert not left_behind(here)
