"""Is what two runs have trained the same? State kept at a boundary, read back and held against each other."""

import pytest
import torch
from torch import nn

from flatout.frameworks.pytorch.input.loaders import Loaders
from flatout.frameworks.pytorch.levers import registry
from flatout.frameworks.pytorch.numerics import trained
from flatout.frameworks.pytorch.numerics.trained import Trained, differences, of_losses
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.session import Session
from flatout.judge import agreement
from flatout.records.trace import Agreement

STEPS = 15


def run(folder, name, *, lr=0.05, nudged=False, draws=0, adam=False):
    """Trains a little as a script does; its states are kept after the first step and the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr) if adam else torch.optim.SGD(model.parameters(), lr=lr)
    calls = Calls()
    calls.look_for(list(model.parameters()))
    session = Session(calls, Loaders(), registry())
    session.add_optimizer(optimizer)
    kept = Trained(session, calls)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if nudged:
            kept.nudge(step + 1)
        if step == 0:
            kept.keep(str(folder / f"{name}.first.pt"))
    torch.rand(draws)
    kept.keep(str(folder / f"{name}.last.pt"))
    return losses


def judged(folder, losses, name):
    files = [folder / f"{one}.pt" for one in ("plain.last", "nudged.last", f"{name}.last", "plain.first")]
    found = differences(*files) + of_losses(losses["plain"], losses["nudged"], losses[name])
    return agreement.judge([Agreement(levers={}, differences=found)], "rounding", ("losses", "parameters"))


@pytest.fixture(params=[False, True], ids=["SGD", "Adam"])
def runs(request, tmp_path):
    changes = {"plain": {}, "nudged": {"nudged": True}, "same": {}, "faster": {"lr": 0.0505}, "drawn": {"draws": 3}}
    return {name: run(tmp_path, name, adam=request.param, **each) for name, each in changes.items()}


def test_equal_runs_agree_and_a_step_that_is_a_hundredth_too_long_does_not(runs, tmp_path):
    assert judged(tmp_path, runs, "same").verdict == "agrees"
    assert judged(tmp_path, runs, "faster").verdict == "disagrees"


def test_what_draws_otherwise_is_told_by_its_generators(runs, tmp_path):
    found = judged(tmp_path, runs, "drawn")
    assert found.verdict == "disagrees" and "random generators end elsewhere" in found.detail


def test_the_memory_of_a_step_is_what_was_held_at_most_since_it_was_asked_last():
    model = nn.Linear(4, 4)
    calls = Calls()
    calls.look_for(list(model.parameters()))
    kept = Trained(Session(calls, Loaders(), registry()), calls)
    assert kept.memory_of_step() is None, "nothing was reset before"
    quiet = kept.memory_of_step()
    held = torch.ones(60_000_000)
    del held
    busy = kept.memory_of_step()
    if quiet is None or busy is None:
        pytest.skip("the kernel's mark cannot be reset here")
    assert busy - quiet > 200e6 and busy - kept.memory_of_step() > 200e6


def test_a_nudge_moves_each_parameter_in_its_last_place(runs, tmp_path):
    plain, nudged = (torch.load(tmp_path / f"{name}.last.pt", weights_only=False) for name in ("plain", "nudged"))
    for place, tensor in plain["tensors"].items():
        if place.startswith("parameter") and plain["names"][place].endswith("weight"):
            moved = (nudged["tensors"][place] - tensor).norm() / tensor.norm()
            assert 0 < moved < 1e-3, plain["names"][place]


def test_a_run_that_trains_other_parameters_disagrees(runs, tmp_path):
    kept = torch.load(tmp_path / "same.last.pt", weights_only=False)
    kept["tensors"].pop("parameter 0")
    torch.save(kept, tmp_path / "same.last.pt")
    assert judged(tmp_path, runs, "same").detail == "other parameters were trained"


def test_without_losses_nothing_is_believed(runs, tmp_path):
    found = judged(tmp_path, {**runs, "same": []}, "same")
    assert found.verdict == "inconclusive" and "losses not compared" in found.detail


def test_the_worst_parameter_is_named_as_the_script_calls_it(runs, tmp_path):
    files = [tmp_path / f"{one}.pt" for one in ("plain.last", "nudged.last", "faster.last", "plain.first")]
    assert trained.differences(*files)[0].multiple_of in {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }
