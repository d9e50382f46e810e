"""Do compilations, ours and the script's own, go with the seam? The script's use a backend that generates no code."""

import gc
import io
import logging
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
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
    from flatout.frameworks.pytorch.adapter import num_compilations

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


@needs_compiler
def test_a_compiler_that_breaks_in_the_middle_of_a_run_ends_the_lever_and_not_the_run(tmp_path):
    broken, compiler = tmp_path / "broken", tmp_path / "compiler"
    real = shutil.which("g++") or shutil.which("clang++")
    compiler.write_text(f'#!/bin/sh\n[ -e "{broken}" ] && exit 1\nexec {real} "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}

    def run(*before):
        broken.unlink(missing_ok=True)
        command = [sys.executable, *before, SCRIPTS / "compiler_breaks.py", broken]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)

    plain, under = run(), run(SCRIPTS / "under_levers.py", '{"compile": {}}')
    assert "flatout failed in step" in under.stderr and "C++ compile error" in under.stderr
    assert list((tmp_path / "kernels").rglob("*.so")), "it had been compiled before"
    assert under.stdout == plain.stdout


@needs_compiler
def test_the_backward_is_compiled_in_the_call_where_an_error_can_be_caught(watch):
    from torch._dynamo.utils import counters

    def num_compiled():
        return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]

    watched, model = watch(), net()
    optimizer = adam(model)
    train(model, optimizer)
    watched.pytorch.engage({"compile": {}})
    out = model(torch.randn(3, 4))
    assert num_compiled() == 2, "forward and backward"
    out.sum().backward()
    assert num_compiled() == 2
    watched.pytorch.engage({})


@pytest.fixture
def limit_of_two():
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=2):
        yield


class Counting(nn.Module):
    """What a number in the module says is compiled into the code, so each call needs another."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = nn.Linear(4, 2), 0

    def forward(self, x):
        self.num_calls += 1
        return self.layer(x) * self.num_calls


@needs_compiler
def test_where_pytorch_gives_up_compiling_again_the_evidence_says_so_and_nothing_is_printed(watch, capfd, limit_of_two):
    watched, model, other = watch(), Counting(), net()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1e-4)

    def step(num):
        for _ in range(num):
            optimizer.zero_grad()
            (model(torch.randn(3, 4)).sum() + other(torch.randn(3, 4)).sum()).backward()
            optimizer.step()

    step(8)
    watched.pytorch.engage({"compile": {}})
    step(2)
    assert "limit" not in watched.pytorch.evidence()[0]["compile"]
    step(4)
    proof = watched.pytorch.evidence()[0]["compile"]
    assert proof == "3 graphs compiled; PyTorch's limit of 2 was reached: other shapes and values run as plain"
    watched.pytorch.engage({})
    watched.pytorch.engage({"compile": {}})
    assert "limit of 2" in watched.pytorch.evidence()[0]["compile"]
    assert "recompile_limit" not in capfd.readouterr().err
    watched.pytorch.engage({})
    assert logging.getLogger("torch._dynamo.convert_frame").filters == []


@needs_compiler
def test_dynamic_takes_every_shape_with_one_code(watch):
    from torch._dynamo.utils import counters

    watched, model = watch(), net()
    optimizer = adam(model)

    def step(num_rows):
        optimizer.zero_grad()
        model(torch.randn(num_rows, 4)).pow(2).mean().backward()
        optimizer.step()

    for num_rows in range(2, 14):
        step(num_rows)
    assert watched.pytorch.facts().models[0].num_input_shapes > 5
    watched.pytorch.engage({"compile": {"mode": "dynamic"}})
    for num_rows in range(2, 14):
        step(num_rows)
    assert counters["stats"]["unique_graphs"] == 1
    assert watched.pytorch.evidence() == ({"compile": "1 graph compiled"}, {})


@needs_compiler
def test_max_autotune_agrees_and_is_kept_beside_the_bare_one(watch, settings_of_torch):
    watched, model = watch(), net()
    optimizer, before = adam(model), settings_of_torch()
    watched.compare(6, {"compile": {"mode": "max-autotune"}}, "gradients")
    train(model, optimizer)
    assert watched.difference().error < 1e-4 and watched.difference().random_states_equal
    for settings in ({}, {"mode": "max-autotune"}, {}, {"mode": "max-autotune"}):
        watched.pytorch.engage({"compile": settings})
        train(model, optimizer, num=2)
    compiled = num_frames()
    watched.pytorch.engage({"compile": {}})
    train(model, optimizer, num=2)
    assert num_frames() == compiled
    watched.pytorch.engage({})
    assert settings_of_torch() == before


@needs_compiler
@pytest.mark.parametrize("settings", [{}, {"mode": "regional"}])
def test_a_compiled_model_goes_when_the_script_drops_it(settings, watch):
    watched, model = watch(), nn.Sequential(*(net() for _ in range(3)))
    for part in model:
        part.last = nn.Linear(8, 4)
    optimizer = adam(model)
    train(model, optimizer)
    watched.pytorch.engage({"compile": settings})
    train(model, optimizer, num=2)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    watched.pytorch.engage({})


# -- which words are tried -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "num_shapes", "words"),
    [
        (0, 1, ["", "max-autotune"]),
        (6, 1, ["", "regional", "max-autotune"]),
        (24, 1, ["regional", "", "max-autotune"]),
        (0, 2, ["", "max-autotune"]),
        (0, 4, ["dynamic", "", "max-autotune"]),
        (24, 4, ["dynamic", "regional", "", "max-autotune"]),
    ],
)
def test_the_word_that_the_facts_speak_for_comes_first(num_blocks, num_shapes, words):
    model = replace(FACTS.models[0], num_repeated_blocks=num_blocks, num_input_shapes=num_shapes)
    found = registry()["compile"].settings(replace(FACTS, models=(model,)), MACHINE)
    assert [settings.get("mode", "") for settings in found] == words
    on_gpu = registry()["compile"].settings(replace(FACTS, device="cuda", models=(model,)), MACHINE)
    before = [settings.get("mode", "") for settings in on_gpu[: len(words) - 1]]
    assert "regional" not in words or before.index("regional") < before.index("")


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, True),
        ({"num_input_shapes": 2}, False),
        ({"calls_per_step": 4.0}, False),
    ],
)
def test_graphs_are_recorded_only_on_a_gpu_with_one_shape_and_one_call_a_step(changes, recorded):
    model = replace(FACTS.models[0], **changes)
    lever = registry()["compile"]
    for device, wanted in (("cuda", recorded), ("cpu", False)):
        found = lever.settings(replace(FACTS, device=device, models=(model,)), MACHINE)
        assert ({"mode": "reduce-overhead"} in found) is wanted
    distributed = replace(FACTS, device="cuda", models=(model,), distributed=True)
    assert {"mode": "reduce-overhead"} not in lever.settings(distributed, MACHINE)


@pytest.mark.parametrize(
    ("word", "brought", "worth"),
    [
        ("", {}, True),
        ("", {"dynamic": "failed"}, True),
        ("", {"regional": "best"}, True),
        ("", {"regional": "measured"}, False),
        ("regional", {}, True),
        ("regional", {"": "failed"}, True),
        ("regional", {"": "best"}, False),
        ("regional", {"": "measured"}, False),
        ("max-autotune", {"": "best"}, True),
        ("max-autotune", {"": "measured"}, False),
        ("max-autotune", {"": "failed", "regional": "best"}, False),
        ("max-autotune", {}, False),
        ("reduce-overhead", {"": "best"}, True),
        ("reduce-overhead", {"": "measured"}, False),
    ],
)
def test_a_word_is_tried_after_others_only_where_they_broke_or_won(word, brought, worth):
    assert registry()["compile"].worth_after({"mode": word} if word else {}, brought) is worth


# -- models that are not trained -----------------------------------------------------------------------------------


def taught(teacher, model):
    """The script's forward, with a teacher in each step."""

    def forward(x):
        with torch.no_grad():
            wanted = teacher(x)
        return model(x) - wanted

    return forward


def test_a_function_that_the_script_compiles_around_a_teacher_is_not_compiled_again_for_us(watch):
    watched, teacher, model = watch(), sequential().eval(), net()
    forward = taught(torch.compile(lambda x: teacher(x), backend="eager", fullgraph=True), model)
    train(forward, adam(model))
    assert num_frames() == 1
    watched.pytorch.coast()
    train(forward, adam(model), num=3)
    watched.pytorch.start_window()
    train(forward, adam(model), num=3)
    assert num_frames() == 1 and [call.module for call in watched.pytorch.calls.found] == [model]


@needs_compiler
@pytest.mark.parametrize("by_script", [False, True])
def test_a_teacher_is_compiled_as_well_unless_the_script_does_so(by_script, watch):
    watched, teacher, model = watch(), sequential().eval(), net()
    if by_script:
        teacher.compile(backend="eager")
    train(taught(teacher, model), adam(model))
    watched.pytorch.engage({"compile": {}})
    ours = {call.module: call for call in watched.pytorch.calls.found}
    assert [ours[one].compute is None for one in (teacher, model)] == [by_script, False]
    facts = watched.pytorch.facts()
    assert registry()["compile"].applies(facts, replace(MACHINE, cxx_compiler="g++")) is None
    before, x = num_frames(), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.allclose(teacher(x), teacher._call_impl(x), rtol=1e-5)
    assert (num_frames() > before) != by_script
    watched.pytorch.engage({})
    assert all(call.compute is None for call in ours.values())
