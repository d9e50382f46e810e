"""Do snapshots of random generators and modules put back every bit?"""

import random

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.seams.module_state import ModuleState  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402

DRAWS = {
    "torch": lambda own: torch.rand(1),
    "python": lambda own: random.random(),
    "numpy": lambda own: np.random.rand(),
    "one normal number of numpy": lambda own: np.random.randn(),
    "a generator of the script's own": lambda own: torch.rand(1, generator=own),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_generator_is_compared_and_put_back(name):
    own = torch.Generator().manual_seed(3)
    before = RandomStates([own, None])
    first = DRAWS[name](own)
    assert not before.equals(RandomStates([own, None]))
    before.restore()
    assert before.equals(RandomStates([own, None]))
    assert DRAWS[name](own) == first


def test_the_second_number_of_a_gaussian_pair_counts_as_state():
    np.random.seed(0)
    before = RandomStates()
    np.random.randn(2)
    after_two = RandomStates()
    before.restore()
    np.random.randn(1)
    assert not after_two.equals(RandomStates())


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("codebook", torch.zeros(2))
        self.hidden = None
        self.seen = []
        self.counts = {"calls": 0}
        self.memory = torch.zeros(2)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.seen.append(x.shape)
        self.counts["calls"] += 1
        self.memory += x.detach().mean(0)
        self.codebook = self.codebook + 1  # another tensor in the buffer's place
        self.hidden = x.detach()
        self.late = True
        return self.norm(x) * self.weight


def test_what_a_module_remembers_between_calls_is_put_back():
    model = Stateful()
    model(torch.randn(4, 2))
    del model.late
    buffers = dict(model.named_buffers())
    values = {name: value.clone() for name, value in buffers.items()}
    hidden, memory, seen = model.hidden, model.memory.clone(), list(model.seen)
    state = ModuleState(model)
    model(torch.randn(4, 2))
    model.eval()
    state.restore()
    assert all(now is buffers[name] for name, now in model.named_buffers())
    assert all(torch.equal(now, values[name]) for name, now in model.named_buffers())
    assert model.hidden is hidden and torch.equal(model.memory, memory)
    assert model.seen == seen and model.counts == {"calls": 1}
    assert not hasattr(model, "late") and model.training and model.norm.training


def test_parameters_and_hooks_are_no_part_of_it():
    model = Stateful()
    state = ModuleState(model)
    with torch.no_grad():
        model.weight.add_(1)
    handle = model.register_forward_hook(lambda *_: None)
    state.restore()
    assert model.weight.tolist() == [2, 2] and len(model._forward_hooks) == 1
    handle.remove()


def test_putting_values_back_does_not_disturb_a_graph_that_is_still_to_be_differentiated():
    model = nn.BatchNorm1d(2).eval()
    x = torch.randn(4, 2, requires_grad=True)
    out = model(x)  # in evaluation the statistics are kept for backward
    ModuleState(model).restore()
    out.sum().backward()
    assert x.grad is not None


def test_a_scripted_module_has_its_buffers_kept():
    model = torch.jit.script(nn.BatchNorm1d(2))
    state = ModuleState(model)
    model(torch.randn(4, 2))
    state.restore()
    assert model.running_mean.tolist() == [0, 0]
