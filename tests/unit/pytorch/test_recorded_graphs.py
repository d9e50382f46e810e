"""Does a script keep what it keeps where a model's results lie in the same memory at each call?

CUDA graphs need a GPU. Here something stands in for them that overwrites outputs and gradients as they do.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.seams.recorded_graphs import OwnGradients, num_recorded, with_own_outputs  # noqa: E402


class _Replayed(torch.autograd.Function):
    """A product whose output and gradients lie where they lay the last time."""

    places: dict = {}  # noqa: RUF012

    @staticmethod
    def at(name, value):
        place = _Replayed.places.setdefault(name, torch.empty_like(value))
        return place.detach().copy_(value)

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _Replayed.at("out", x @ weight)

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        return None, _Replayed.at("gradient", x.T @ gradient)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return x @ self.weight


def replayed(module, x):
    return {"logits": _Replayed.apply(x, module.weight), "x": x, "weight": module.weight}


@pytest.fixture(autouse=True)
def fresh_places():
    _Replayed.places.clear()


@pytest.fixture
def recorded(watch, monkeypatch):
    """A model that trains under `compile=reduce-overhead`, where the compiler gives it results that it overwrites."""
    marks = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: lambda m, x: _Replayed.apply(x, m.weight))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    watched, model = watch(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.model, watched.optimizer, watched.marks = model, optimizer, marks
    return watched


def step(watched, x, num_backwards=1):
    watched.optimizer.zero_grad(set_to_none=False)
    outs = []
    for _ in range(num_backwards):
        outs.append(watched.model(x))
        outs[-1].pow(2).mean().backward()
        x = x + 1
    watched.optimizer.step()
    return outs


def test_without_copies_what_is_kept_would_be_overwritten():
    model = Net()
    first = replayed(model, torch.ones(3, 4))["logits"]
    before = first.clone()
    replayed(model, torch.zeros(3, 4))
    assert not torch.equal(first, before), "what stands in for the graphs does not overwrite"


def test_outputs_are_the_scripts_and_what_it_gave_comes_back_itself():
    model, x = Net(), torch.ones(3, 4)
    call = with_own_outputs(replayed)
    first = call(model, x)
    before = first["logits"].clone()
    call(model, torch.zeros(3, 4))
    assert torch.equal(first["logits"], before)
    assert first["x"] is x and first["weight"] is model.weight
    first["logits"].sum().backward()
    assert torch.equal(model.weight.grad, x.T @ torch.ones(3, 2))


def test_gradients_that_are_kept_and_accumulated_stay():
    model, x = Net(), torch.ones(3, 4)
    own = OwnGradients(model.parameters())
    replayed(model, x)["logits"].sum().backward()
    first = model.weight.grad
    before = first.clone()
    model.weight.grad = None
    replayed(model, 2 * x)["logits"].sum().backward()
    assert torch.equal(first, before)
    replayed(model, x)["logits"].sum().backward()
    assert torch.equal(model.weight.grad, 3 * before)
    assert model.weight._backward_hooks is None and model.weight._post_accumulate_grad_hooks is None
    copy.deepcopy(model)
    own.remove()
    model.weight.grad = None
    replayed(model, x)["logits"].sum().backward()
    assert model.weight.grad.data_ptr() == _Replayed.places["gradient"].data_ptr()


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_a_script_under_the_lever_trains_as_plain_and_each_step_is_told(recorded, num_backwards):
    other = copy.deepcopy(recorded.model)
    plain = copy.copy(recorded)
    plain.model, plain.optimizer = other, torch.optim.SGD(other.parameters(), lr=0.1)
    xs = torch.randn(14, 3, 4)
    for x in xs[:8]:
        step(recorded, x, num_backwards)
    recorded.pytorch.calls.device = "cuda"
    recorded.pytorch.engage({"compile": {"mode": "reduce-overhead"}})
    kept = [step(recorded, x, num_backwards) for x in xs[8:]]
    assert len(recorded.marks) == 6
    recorded.pytorch.calls.device = "cpu"
    recorded.pytorch.engage({})
    assert "compile" not in recorded.pytorch.session.at_step_end
    recorded.pytorch.detach()
    for x in xs[:8]:
        step(plain, x, num_backwards)
    wanted = [step(plain, x, num_backwards) for x in xs[8:]]
    for ours, theirs in zip(kept, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert torch.equal(recorded.model.weight, other.weight)


def test_without_a_gpu_the_word_is_refused_and_nothing_is_left(recorded):
    for x in torch.randn(8, 3, 4):
        step(recorded, x)
    recorded.pytorch.engage({"compile": {"mode": "reduce-overhead"}})
    step(recorded, torch.randn(3, 4))
    assert recorded.pytorch.evidence() == ({}, {"compile": "CUDA graphs need a model on a CUDA device"})
    assert recorded.marks == [] and num_recorded() == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_graphs_are_recorded_and_the_gradients_agree(watch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    watched, model = watch(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(num):
        kept = []
        for _ in range(num):
            optimizer.zero_grad()
            kept.append(model(torch.randn(16, 4, device="cuda")))
            kept[-1].pow(2).mean().backward()
            optimizer.step()
        return kept

    train(8)
    watched.compare(10, {"compile": {"mode": "reduce-overhead"}}, "gradients")
    train(6)
    assert watched.difference().error < 1e-4
    watched.pytorch.engage({"compile": {"mode": "reduce-overhead"}})
    kept = train(6)
    assert all(out.isfinite().all() for out in kept)
    proofs, missing = watched.pytorch.evidence()
    assert "recorded" in proofs["compile"] and missing == {}
    watched.pytorch.engage({})
    train(3)
