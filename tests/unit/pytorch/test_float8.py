"""Do torchao's layers stand in for the script's in its training calls only, and is the script's model what it was?

torchao needs a GPU. Here something stands in for it that rounds, and replaces layers as torchao does.
"""

import copy
import sys
from dataclasses import replace
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from flatout.frameworks.pytorch.levers import float8, registry  # noqa: E402
from flatout.records.ceilings import Accelerator  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["float8"]
ENGAGED = {"float8": {}}
GPU = Accelerator(name="GPU", memory_bytes=2**36, compute_capability="9.0")


class Rounding(nn.Linear):
    """A layer that multiplies with fewer bits, and says so where torchao's does."""

    def forward(self, x):
        self.calls.append(self.training)
        torch._scaled_mm()
        return nn.functional.linear(x.bfloat16().float(), self.weight, self.bias)


@pytest.fixture
def torchao(monkeypatch):
    """What `torchao.float8` does to a model, with `Rounding` for its layers."""
    fake = ModuleType("torchao.float8")
    fake.calls = []

    def convert(module, *, module_filter_fn, config):
        assert config == {"pad_inner_dim": True}
        for name, parent in list(module.named_modules()):
            for own, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and module_filter_fn(child, f"{name}.{own}"):
                    with torch.device("meta"):
                        made = Rounding(child.in_features, child.out_features, bias=False)
                    made.weight, made.bias, made.calls = child.weight, child.bias, fake.calls
                    setattr(parent, own, made)
        return module

    fake.convert_to_float8_training, fake.Float8LinearConfig = convert, dict
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda: None)
    return fake


class Net(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 5)
        self.middle, self.recompute = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), recompute

    def forward(self, x):
        x = self.drop(self.first(x).relu())
        x = checkpoint(self.middle, x, use_reentrant=False) if self.recompute else self.middle(x)
        return self.last(x)


def script(**options):
    torch.manual_seed(0)
    model = Net(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(num):
        for _ in range(num):
            optimizer.zero_grad()
            model(torch.randn(6, 16)).pow(2).mean().backward()
            optimizer.step()

    return model, train


def kinds(model):
    return {type(module) for module in model.modules()}


def test_layers_are_replaced_in_training_calls_alone_and_the_parameters_are_the_scripts(watch, torchao):
    watched = watch()
    model, train = script()
    train(8)
    modules, parameters = [*model.named_modules()], [id(p) for p in model.parameters()]
    attributes = [set(vars(m)) for m in model.modules()]
    before = model.first.weight.clone()
    watched.pytorch.engage(ENGAGED)
    assert [*model.named_modules()] == modules, "engaging leaves the model as it is"
    train(3)
    proofs, missing = watched.pytorch.evidence()
    assert proofs == {"float8": "2 Linear layers replaced, `_scaled_mm` seen"} and missing == {}
    assert torchao.calls == [True] * 6, "the last layer has 5 outputs and is the script's"
    assert not torch.equal(model.first.weight, before)
    assert [*model.named_modules()] == modules and [id(p) for p in model.parameters()] == parameters
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert Rounding not in kinds(copy.deepcopy(model))
    model.eval()
    with torch.no_grad():
        model(torch.randn(6, 16))
    assert len(torchao.calls) == 6
    watched.pytorch.engage({})
    model.train()
    train(2)
    assert len(torchao.calls) == 6 and [*model.named_modules()] == modules


def test_engaging_and_releasing_is_the_identity(watch, torchao):
    other, train_other = script()
    train_other(16)
    watched = watch()
    model, train = script()
    train(8)
    watched.pytorch.engage(ENGAGED)
    watched.pytorch.engage({})
    train(8)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_the_scripts_own_checkpoint_finds_the_same_layers_in_the_backward(watch, torchao):
    watched = watch()
    _, train = script(recompute=True)
    train(8)
    watched.pytorch.engage(ENGAGED)
    train(3)
    assert len(torchao.calls) == 3 * 3


def test_layers_with_hooks_and_layers_that_the_script_replaces_are_its_own(watch, torchao):
    watched = watch()
    model, train = script()
    called = []
    model.first.register_forward_hook(lambda *_: called.append(1))
    train(8)
    watched.pytorch.engage(ENGAGED)
    train(1)
    assert len(called) == 9 and len(torchao.calls) == 1
    model.middle[0] = own = nn.Linear(32, 32)
    train(1)
    watched.pytorch.engage({})
    assert model.middle[0] is own and len(torchao.calls) == 1


def test_where_torchao_is_not_installed_that_is_said(watch, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    watched = watch()
    model, train = script()
    train(8)
    watched.pytorch.engage(ENGAGED)
    train(1)
    assert watched.pytorch.evidence() == ({}, {"float8": "torchao is not installed: `pip install torchao`"})
    assert kinds(model) == kinds(Net())


@pytest.mark.parametrize(
    ("facts", "aligned", "capability", "installed", "reason"),
    [
        ({}, 2, "9.0", True, None),
        ({"device": "cpu"}, 2, "9.0", True, "no CUDA device is used"),
        ({"distributed": True}, 2, "9.0", True, "distributed wrappers may hold the layers that it replaces"),
        ({}, 0, "9.0", True, "no Linear layer whose dimensions are divisible by 16"),
        ({}, 2, "8.0", True, "needs a GPU with float8 (compute capability 8.9 or newer)"),
        ({}, 2, None, True, "needs a GPU with float8 (compute capability 8.9 or newer)"),
        ({}, 2, "9.0", False, "needs torchao: `pip install torchao`"),
    ],
)
def test_it_applies_to_fitting_layers_on_a_gpu_with_float8(facts, aligned, capability, installed, reason, monkeypatch):
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: object() if installed else None)
    model = replace(FACTS.models[0], num_aligned_linears=aligned)
    found = replace(FACTS, **{"device": "cuda", "models": (model,), **facts})
    machine = replace(MACHINE, accelerators=(replace(GPU, compute_capability=capability),))
    assert LEVER.applies(found, machine) == reason


def test_fitting_layers_become_a_fact(watch):
    watched = watch()
    _, train = script()
    train(8)
    assert watched.pytorch.facts().models[0].num_aligned_linears == 2
