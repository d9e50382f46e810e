"""Does a script keep what it keeps where a model's results lie in the same memory at each call?

CUDA graphs need a GPU. Here something stands in for them that overwrites outputs and gradients as they do.
"""

import copy
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.seams.recorded_graphs import OwnGradients, num_recorded, with_own_results  # noqa: E402


class _Replayed(torch.autograd.Function):
    """A product whose output and gradients lie where they lay the last time, in memory that no tensor of it owns."""

    places: dict = {}  # noqa: RUF012
    marks: list = []  # noqa: RUF012

    @staticmethod
    def at(name, value):
        while _Replayed.marks:  # a step has begun, and what lies there from former ones is given up
            _Replayed.marks.pop()
            for former in _Replayed.places.values():
                former.fill(np.nan)
            _Replayed.places.clear()
        place = _Replayed.places.setdefault(name, np.empty(value.shape, np.float32))
        return torch.from_numpy(place).copy_(value)

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
    _Replayed.marks.clear()


@pytest.fixture
def recorded(watch, monkeypatch):
    """A model that trains under `compile=reduce-overhead`, where the compiler gives it results that it overwrites."""
    marks = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: lambda m, x: _Replayed.apply(x, m.weight))
    monkeypatch.setattr(
        torch.compiler, "cudagraph_mark_step_begin", lambda: (marks.append(1), _Replayed.marks.append(1))
    )
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
    call = with_own_results(replayed, None, lambda: None)
    first = call(model, x)
    before = first["logits"].clone()
    call(model, torch.zeros(3, 4))
    assert torch.equal(first["logits"], before)
    assert first["x"] is x and first["weight"] is model.weight
    first["logits"].sum().backward()
    assert torch.equal(model.weight.grad, x.T @ torch.ones(3, 2))


@pytest.fixture
def following():
    """A model whose gradients are a graph's, in a script that does with them what it wants."""
    model = Net()
    own, plain, copies = OwnGradients(model.parameters()), [], []

    def plainly(module, x):
        plain.append(x)
        return {"logits": x @ module.weight}

    call = with_own_results(replayed, plainly, lambda: own)

    def step(x):
        before = model.weight.grad
        place = None if before is None else before.data_ptr()
        logits = call(model, x)["logits"]
        copies.append(before is not None and before.data_ptr() != place)
        logits.sum().backward()
        own.end_step()

    yield SimpleNamespace(model=model, step=step, plain=plain, copies=copies)
    own.remove()
    assert model.weight._backward_hooks is None and model.weight._post_accumulate_grad_hooks is None
    copy.deepcopy(model)


def ones(factor=1):
    return factor * torch.ones(3, 4)


def test_gradients_that_are_set_to_none_are_not_copied(following):
    for factor in (1, 2, 3):
        following.step(ones(factor))
        assert torch.equal(following.model.weight.grad, 3 * ones(factor).T[:, :2])
        assert following.model.weight.grad.data_ptr() == _Replayed.places["gradient"].ctypes.data
        following.model.weight.grad = None
    assert not any(following.copies) and not following.plain


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_are_accumulated_or_zeroed_in_place_are_copied_once(following, clears):
    total = torch.zeros(4, 2)
    for factor in (1, 2, 3):
        total = 3.0 * factor + (0 if clears else total) * torch.ones(4, 2)
        following.step(ones(factor))
        assert torch.equal(following.model.weight.grad, total)
        if clears:
            following.model.weight.grad.zero_()
    assert following.copies == [False, True, False] and not following.plain


def test_a_gradient_that_the_script_holds_by_the_same_tensor_stays_what_it_is(following):
    following.step(ones())
    held = following.model.weight.grad
    following.step(ones(2))
    assert held is following.model.weight.grad and torch.equal(held, torch.full((4, 2), 9.0))


@pytest.mark.parametrize("view", [lambda g: g, lambda g: g.detach(), lambda g: g.view(-1)[2:]])
def test_while_the_script_keeps_gradients_of_a_former_step_it_is_computed_plainly(following, view):
    following.step(ones())
    kept = view(following.model.weight.grad)
    before = kept.clone()
    following.model.weight.grad = None
    following.step(ones(2))
    following.model.weight.grad = None
    assert torch.equal(kept, before) and len(following.plain) == 1
    del kept
    following.step(ones(3))
    assert len(following.plain) == 1


def test_gradients_that_are_parts_of_a_buffer_of_the_scripts_stay_parts_of_it(following):
    flat = torch.zeros(8)
    following.model.weight.grad = flat.view(4, 2)
    following.step(ones())
    following.step(ones(2))
    assert torch.equal(flat, torch.full((8,), 9.0)) and not any(following.copies) and not following.plain


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


def test_a_comparison_takes_gradients_out_of_the_recordings_and_marks_each_replay(recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    xs, numerics, seen = torch.randn(14, 3, 4), recorded.pytorch.numerics, []
    run = numerics._replayer.run

    def noted(calls, **options):
        num = len(recorded.marks)
        found = run(calls, **options)
        seen.append((options.get("levers", False), len(recorded.marks) - num))
        return found

    monkeypatch.setattr(numerics._replayer, "run", noted)
    for x in xs[:6]:
        step(recorded, x)
    recorded.pytorch.calls.device = "cuda"
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.capture.room_bytes", lambda device: 10**9)
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.replay.place_for", lambda *_: lambda tensor: tensor)
    recorded.pytorch.begin_capture()
    compare = recorded.pytorch.compare
    recorded.listener.waiting = lambda: recorded.answers.append(
        compare({"compile": {"mode": "reduce-overhead"}}, ("gradients",))
    )
    for x in xs[6:]:
        step(recorded, x)
    recorded.pytorch.calls.device = "cpu"
    found = recorded.difference()
    assert found.error < 1e-6 and found.fault == ""
    assert {marks for levers, marks in seen if levers} == {1} and {m for levers, m in seen if not levers} == {0}


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
