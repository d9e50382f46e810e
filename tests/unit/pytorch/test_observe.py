"""Does `flatout.observe()` see the steps of a program of one's own, and leave nothing behind?"""

import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import flatout  # noqa: E402
from flatout.child import observe as observing  # noqa: E402


def train(num=40, *, pause_s=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in DataLoader(TensorDataset(torch.randn(2 * num, 4)), batch_size=2):
        time.sleep(pause_s)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_steps_are_counted_and_taken_apart():
    with flatout.observe() as run:
        train(pause_s=0.002)
    assert run.num_steps == 40 and run.problems == []
    anatomy = run.anatomy
    assert sum(anatomy.phases_s.values()) == pytest.approx(anatomy.step_s)
    assert {"data", "forward", "backward", "optimizer", "unattributed"} <= set(anatomy.phases_s)
    assert anatomy.share("unattributed") > 0.3  # the sleep
    assert run.steps_per_s < 500
    assert str(run).startswith("40 steps, ") and "unattributed" in str(run)
    assert run.facts.device == "cpu" and len(run.facts.loaders) == 1


def test_the_numbers_are_the_same_and_nothing_is_left():
    before = (torch.autograd.backward, torch.save, DataLoader.__iter__, nn.Module.__call__)
    plain = train()
    with flatout.observe():
        watched = train()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert (torch.autograd.backward, torch.save, DataLoader.__iter__, nn.Module.__call__) == before


def test_a_block_without_a_step_says_so():
    with flatout.observe() as run:
        pass
    assert run.num_steps == 0 and str(run) == "0 steps, too few to take one apart"
    with pytest.raises(flatout.Inconclusive):
        _ = run.anatomy


def test_an_exception_in_the_block_is_the_programs_own_and_ends_it():
    with pytest.raises(ZeroDivisionError), flatout.observe() as run:
        train()
        _ = 1 / 0
    assert run.num_steps == 40
    with flatout.observe() as again:
        train()
    assert again.num_steps == 40


def test_two_blocks_at_once_are_refused_and_the_first_goes_on():
    with flatout.observe() as run:
        with pytest.raises(flatout.UsageError, match="observed already"), flatout.observe():
            pass
        train()
    assert run.num_steps == 40


def test_a_program_that_flatout_has_started_is_refused(watch):
    watch()
    with pytest.raises(flatout.UsageError, match="observed already"), flatout.observe():
        pass


def test_what_breaks_in_the_recorder_costs_the_observation_only(monkeypatch):
    def broken(self, now_s):
        raise RuntimeError("ours")

    monkeypatch.setattr(observing.Observation, "on_step", broken)
    with flatout.observe() as run:
        train()
    assert run.problems and "ours" in run.problems[0]
