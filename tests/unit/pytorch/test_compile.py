"""Do compilations, ours and the script's own, go with the seam? The script's use a backend that generates no code."""

import io
import pickle
import shutil

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler: `apt install g++`"
)


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path_factory, monkeypatch):
    import torch._dynamo
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_frames():
    from flatout.frameworks.pytorch.compilation import num_compilations

    return num_compilations()


class Net(nn.Module):
    """Of the script's own kind: PyTorch's `Module.compile` silently compiles nothing of an `nn.Sequential`."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.drop(self.first(x).relu()))


def sequential():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


net = Net


def train(forward, optimizer, num=12, each=lambda: None):
    for _ in range(num):
        optimizer.zero_grad()
        forward(torch.randn(3, 4)).pow(2).mean().backward()
        optimizer.step()
        each()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


# -- the script's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wrapped", "in place", "in place, later"])
def test_a_model_that_the_script_compiles_is_found_and_stays_compiled(how, watch, different):
    def run(watched=None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = net()
        forward = torch.compile(model, backend="eager") if how == "wrapped" else model
        if how == "in place":
            model.compile(backend="eager")
        optimizer = adam(model)
        train(forward, optimizer, num=6)
        if how == "in place, later":
            model.compile(backend="eager")
            if watched is not None:
                watched.pytorch.start_window()
        before = num_frames()
        train(forward, optimizer)
        return model, forward, num_frames() - before

    plain, _, plain_frames = run()
    assert num_frames() > 0
    watched = watch()
    model, forward, frames = run(watched)
    (call,) = watched.pytorch.calls.found
    assert call.compiled_by_script and call.num_training_calls >= 10
    assert watched.pytorch.facts().models[0].compiled
    assert frames == plain_frames, "nothing was compiled again for us"
    assert different(plain.state_dict(), model.state_dict()) == []
    assert list(forward.state_dict()) == [
        ("_orig_mod." if how == "wrapped" else "") + name for name in model.state_dict()
    ]
    data = io.BytesIO()
    torch.save(model, data)
    assert b"flatout" not in data.getvalue() and b"flatout" not in pickle.dumps(model)
    watched.pytorch.detach()
    assert type(vars(model).get("_compiled_call_impl")).__name__ != "OuterCall"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_function_around_the_model_is_not_broken_by_the_seam(fullgraph, watch):
    def run(watched=None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = net()
        optimizer = adam(model)

        @torch.compile(backend="eager", fullgraph=fullgraph)
        def loss_of(x):
            return model(x).pow(2).mean()

        before = num_frames()
        for number in range(14):
            optimizer.zero_grad()
            loss_of(torch.randn(3, 4)).backward()
            optimizer.step()
            if watched is not None and number == 6:
                watched.pytorch.engage({"bf16": {}})
            if watched is not None and number == 9:
                watched.pytorch.observe("phases")
        return model, num_frames() - before

    plain, frames = run()
    watched = watch()
    model, watched_frames = run(watched)
    assert watched_frames <= frames + 2, "at most once for the seam's coming and going"
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_function_compiled_when_the_seam_is_there_already_is_computed_as_plain(watch):
    watched, model = watch(), net()
    optimizer = adam(model)
    train(model, optimizer)
    watched.pytorch.engage({"bf16": {}})
    model.eval()
    around = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)
    x = torch.randn(3, 4)
    for _ in range(3):
        assert torch.equal(around(x), model._call_impl(x) * 2)
    before = num_frames()
    watched.pytorch.detach()
    assert torch.equal(around(x), model(x) * 2)
    assert num_frames() <= before + 2


def test_a_compiled_update_is_told_of_and_nothing_of_ours_is_traced(watch, recwarn):
    watched, model = watch(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    class Compiled:
        zero_grad = optimizer.zero_grad
        step = staticmethod(torch.compile(lambda: optimizer.step(), backend="eager"))

    train(model, Compiled, num=14)
    assert watched.listener.num_steps >= 10
    assert not [w for w in recwarn if "get_ident" in str(w.message) or "flatout" in str(w.message)]


def test_a_compiled_model_is_left_to_the_script_by_the_lever(watch):
    from flatout.frameworks.pytorch.levers import registry

    watched, model = watch(), net()
    model.compile(backend="eager")
    train(model, adam(model))
    assert "itself" in registry()["compile"].applies(watched.pytorch.facts(), None)


def test_counting_operations_of_a_compiled_model_leaves_it_compiled(watch):
    watched, model = watch(), net()
    model.compile(backend="eager")
    optimizer = adam(model)
    train(model, optimizer)
    watched.pytorch.begin_census()
    train(model, optimizer, num=1)
    assert watched.pytorch.end_census().num_operations > 5
    before = num_frames()
    train(model, optimizer, num=3)
    assert num_frames() == before


# -- ours ----------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("make", [net, sequential])
def test_compilation_by_the_lever_agrees_toggles_and_leaves_no_trace(make, watch, settings_of_torch):
    watched, model = watch(), make()
    optimizer = adam(model)
    before, keys = settings_of_torch(), list(model.state_dict())
    watched.compare(6, {"compile": {}}, "gradients")
    train(model, optimizer, num=12)
    found = watched.difference()
    assert found.error < 1e-4 and found.random_states_equal, "dropout draws what plain draws"
    assert found.explained_cosine == pytest.approx(1, abs=1e-9)
    assert settings_of_torch() == before

    watched.pytorch.engage({"compile": {}})
    train(model, optimizer, num=3)
    assert "compiled" in watched.pytorch.evidence()[0]["compile"]
    compiled = num_frames()
    assert compiled > 0
    for _ in range(3):
        watched.pytorch.engage({})
        train(model, optimizer, num=2)
        watched.pytorch.engage({"compile": {}})
        train(model, optimizer, num=2)
    assert num_frames() == compiled, "the compiled form is kept"

    x = torch.randn(3, 4)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), model._call_impl(x)), "evaluation is plain"
    assert num_frames() == compiled
    assert list(model.state_dict()) == keys
    assert b"flatout" not in pickle.dumps(model)
    watched.pytorch.engage({})
    assert settings_of_torch() == before


@needs_compiler
def test_compilation_goes_with_bf16_and_the_random_numbers_stay_where_plain_has_them(watch, workload, different):
    plain = workload("mlp").train(14).state()
    watched, script = watch(), workload("mlp")
    watched.engage(5, {"compile": {}, "bf16": {}})
    script.train(14)
    proofs, missing = watched.pytorch.evidence()
    assert missing == {} and "bfloat16" in proofs["bf16"]
    assert not {"torch", "python", "numpy"} & set(different(plain, script.state()))
