"""What PyTorch's own profiler sees of a script that trains on the CPU, and what the script sees of it: nothing."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.frameworks.pytorch import adapter
from flatout.frameworks.pytorch.observe import profile_recorder
from flatout.frameworks.pytorch.seams.patches import patched
from flatout.judge.profiled_time import profiled_time


class Watched:
    """Has steps 8 to 13 profiled."""

    def __init__(self):
        self.pytorch = adapter.PyTorch()
        self.num_steps, self.found, self.failures = 0, None, []
        self.pytorch.prepare({}, trial=True)
        self.pytorch.attach(self)

    def on_step(self, step):
        self.num_steps += 1
        if self.num_steps == 8:
            self.pytorch.observe("profile")
            self.pytorch.start_window()
        if self.num_steps == 13:
            self.found = self.pytorch.end_window()["profile"]
            self.pytorch.observe("off")

    def on_update(self):
        """Nothing."""

    def on_pass_end(self):
        """Nothing."""

    def on_failure(self, stage, problem):
        self.failures.append((stage, problem))


@pytest.fixture
def watched():
    one = Watched()
    yield one
    one.pytorch.detach()


def train(at_step=lambda step: None):
    """Sixteen steps; what has been learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
    for step, (x, y) in enumerate(DataLoader(data, batch_size=32)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        at_step(step)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_operators_and_phases_of_whole_steps_are_seen(watched):
    train()
    assert not watched.failures and watched.found.num_steps == 4
    account = profiled_time(watched.found)
    names = [part.name for part in account.parts]
    assert {"aten::addmm", "aten::mm"} <= {*names}
    (addmm,) = [part for part in account.parts if part.name == "aten::addmm"]
    assert addmm.calls == 2, "two layers a step"
    assert {"forward", "backward", "optimizer"} <= {one.phase for one in account.idle}
    assert {"input"} <= {one.cause for one in account.idle}
    assert 0.2 < account.busy_share < 1


def test_profiled_steps_learn_what_plain_ones_do_and_nothing_is_left_behind(watched):
    learned = train()
    watched.pytorch.detach()
    assert torch.equal(learned, train())
    assert "profile._prepare_trace" not in patched() and not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize("broken", ["start", "mark", "stop"])
def test_a_profiler_that_fails_leaves_training_untouched(watched, monkeypatch, broken):
    def fails(self):
        if broken == "stop":
            self._close()
        raise RuntimeError("CUPTI is not there")

    plain = train()
    watched.num_steps = 0
    monkeypatch.setattr(profile_recorder.Kineto, broken, fails)
    assert torch.equal(train(), plain)
    monkeypatch.undo()
    assert watched.found is None
    assert [stage for stage, _ in watched.failures] == ["recorder"]
    assert not torch.autograd.profiler._is_profiler_enabled and "profile._prepare_trace" not in patched()


def test_a_script_that_profiles_itself_already_is_left_to_do_so(watched):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        train()
    assert any(event.key == "aten::addmm" for event in own.key_averages())
    assert watched.found is None and len(watched.failures) == 1


def test_a_script_that_begins_to_profile_itself_meanwhile_may(watched):
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    train(lambda step: {9: own.start, 14: own.stop}.get(step, lambda: None)())
    assert any(event.key == "aten::addmm" for event in own.key_averages())
    assert watched.found is None and len(watched.failures) == 1
