"""Is a script that trains nothing found by its calls, and are its answers the same under levers?"""

import os
import subprocess
import sys
import threading
from importlib.metadata import version
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from answering import Net  # noqa: E402
from flatout.frameworks.pytorch import inference  # noqa: E402
from flatout.frameworks.pytorch.inference import trains  # noqa: E402  as it is without the fixture below
from flatout.judge.agreement import judge  # noqa: E402

pytestmark = pytest.mark.usefixtures("whatever_runs_the_tests_trains")


def answers(net, num, *, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return [net(torch.randn(batch, 3, 8, 8, generator=generator)) for _ in range(num)]


def models(watched):
    return [call.module for call in watched.pytorch.calls.found]


# -- what is a step ------------------------------------------------------------------------------------------------


def test_calls_of_a_model_that_nothing_trains_are_steps(watch):
    watched, net = watch(), Net().eval()
    answers(net, 20)
    assert models(watched) == [net]
    facts = watched.pytorch.facts()
    assert facts.infers and [model.name for model in facts.main_models] == ["Net"]
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 20
    assert "Module.__call__" not in watched.pytorch.patched()


def test_two_models_that_are_called_in_turn_make_one_step(watch):
    watched, first, second = watch(), nn.Linear(4, 4).eval(), nn.Linear(4, 2).eval()
    with torch.no_grad():
        for _ in range(20):
            second(first(torch.ones(1, 4)))
    assert models(watched) == [first, second]
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 20


def test_a_script_that_trains_stays_one_that_trains(watch):
    watched, net = watch(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    answers(net.eval(), 30)  # it looks how good the model is before it begins
    net.train()
    for _ in range(8):
        net(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = watched.pytorch.facts()
    assert not facts.infers and facts.step_rhythm == "optimizer"
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 8


def test_a_training_that_begins_after_all_is_followed(watch):
    watched, net = watch(), Net().eval()
    answers(net, 20)
    assert watched.pytorch.facts().infers
    optimizer = torch.optim.SGD(net.train().parameters(), lr=0.1)
    before = watched.listener.num_steps
    for _ in range(8):
        net(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    facts = watched.pytorch.facts()
    assert not facts.infers and [model.trained for model in facts.models] == [True]
    assert watched.listener.num_steps - before + watched.pytorch.num_missed_steps() == 8


def test_where_calls_are_asked_for_a_training_beside_them_is_left_out(watch):
    from flatout.frameworks.contract import Settings

    watched, net = watch(settings=Settings(infers=True)), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        net.train()
        for _ in range(3):
            net(torch.randn(2, 3, 8, 8)).sum().backward()
            optimizer.step()
        net.eval()
        answers(net, 5)
    assert watched.pytorch.facts().infers
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 20


def test_a_transform_without_parameters_and_a_model_within_a_dataset_are_no_models(watch):
    watched, transform = watch(), nn.Sequential(nn.Flatten(), nn.ReLU()).eval()
    for _ in range(20):
        transform(torch.ones(2, 2))
    assert not models(watched) and not watched.listener.num_steps


def test_parts_that_a_script_calls_in_place_of_the_model_are_its_models(watch):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleDict({"image": nn.Linear(4, 4), "text": nn.Linear(4, 4)})

        def encode(self, x):
            return self.towers["image"](x)

    watched, net = watch(), Encoder().eval()
    for _ in range(20):
        net.encode(torch.ones(1, 4))
    assert models(watched) == [net.towers["image"]] and watched.pytorch.facts().models[0].name == "Encoder.towers.image"


def test_a_model_that_the_script_compiles_is_compiled_once_and_as_a_whole(watch):
    watched, net = watch(), Net().eval()
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    answers(compiled, 20)
    assert len(graphs) == 1 and watched.pytorch.facts().models[0].compiled
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 20


def test_a_call_that_raises_is_no_step_and_raises_as_it_would(watch):
    watched, net = watch(), Net().eval()
    answers(net, 20)
    before = watched.listener.num_steps
    with pytest.raises(RuntimeError, match="channels"), torch.no_grad():
        net(torch.ones(1, 4, 8, 8))
    assert watched.listener.num_steps == before and not watched.listener.failures


def test_the_script_is_looked_through_for_a_backward_pass():
    code = compile("def step(loss):\n    def inner():\n        loss.backward()\n    inner()", "train.py", "exec")
    found = {"__file__": "train.py"}
    exec(code, found)
    codes = inference.__dict__["_codes"]
    assert any("backward" in one.co_names for c in codes(found["step"]) for one in inference._within(c))
    assert not list(codes(SimpleNamespace()))


def test_a_script_that_trains_at_its_top_level_is_seen_while_it_runs_also_from_another_thread():
    found = {}
    for name, rest in (("trains", "loss.backward()"), ("infers", "pass")):
        main = SimpleNamespace(__file__=f"{name}.py", look=trains, found=found)
        lines = f"thread = Thread(target=lambda: found.update({name}=look(main)))\nthread.start()\nthread.join()\n"
        code = compile(f"{lines}if not found:\n    {rest}", main.__file__, "exec")
        exec(code, {**vars(main), "main": main, "Thread": threading.Thread})
    assert found == {"trains": True, "infers": False}


# -- answers -------------------------------------------------------------------------------------------------------


def agreed(watched):
    return judge(watched.answers, "rounding", ("outputs",))


def test_answers_under_a_sound_lever_agree(watch):
    watched, net = watch(), Net().eval()
    watched.compare(6, {"channels_last": {}}, "outputs")
    answers(net, 20)
    assert agreed(watched).verdict == "agrees", agreed(watched).detail
    assert watched.difference("outputs").error < 1e-5


def test_what_a_call_writes_into_its_arguments_is_written_anew_in_each_replay(watch):
    class Kept:
        def __init__(self):
            self.seen = []

    class Remembers(Net):
        def forward(self, x, kept):
            kept.seen.append(x.mean())
            return super().forward(x) + len(kept.seen)

    watched, net, kept = watch(), Remembers().eval(), Kept()
    watched.compare(6, {"channels_last": {}}, "outputs")
    with torch.no_grad():
        for _ in range(20):
            net(torch.ones(1, 3, 8, 8), kept)
    assert agreed(watched).verdict == "agrees" and len(kept.seen) == 20


def test_answers_of_other_weights_disagree(watch):
    watched, net = watch(), Net().eval()
    watched.pytorch.session.levers = {**watched.pytorch.session.levers, "channels_last": Wrong()}
    watched.compare(6, {"channels_last": {}}, "outputs")
    answers(net, 20)
    assert agreed(watched).verdict == "disagrees"


class Wrong:
    """A lever that answers a little more than the model."""

    name, class_, toggles, compiles = "channels_last", "rounding", "step", False

    def engage(self, session, settings):
        for call in session.calls.found:
            call.compute = lambda *args, _plain=call.plain: _plain(*args) * 1.01

    def release(self, session):
        for call in session.calls.found:
            call.compute = None

    def evidence(self, session):
        return "wrong"


def test_inference_mode_gives_ordinary_tensors_that_need_gradients_where_plain_ones_do(watch):
    watched, net = watch(), Net().eval()
    watched.engage(6, {"inference_mode": {}})
    (*_, last) = answers(net, 20)
    assert not last.is_inference() and not last.requires_grad
    last += 1
    out = net(torch.ones(1, 3, 8, 8))
    assert out.requires_grad and not out.is_inference()
    assert "calls" in watched.pytorch.evidence()[0]["inference_mode"]


# -- another runtime -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["onnxruntime", "openvino"])
def runtime(request):
    for package in {"onnxruntime": ("onnxruntime", "onnxscript"), "openvino": ("openvino",)}[request.param]:
        pytest.importorskip(package, reason=f"needs {package}: pip install 'flatout[onnx,openvino]'")
    return request.param


def under(runtime, watched, net):
    answers(net, 12)
    watched.pytorch.engage({runtime: {}})
    return watched.pytorch.calls.found[0].kept[runtime]


def test_another_runtime_gives_the_models_answers_in_memory_of_their_own(watch, runtime):
    watched, net = watch(), Net().eval()
    true = answers(net, 12)
    under(runtime, watched, net)
    found = answers(net, 12)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, true, strict=True))
    assert len({one.data_ptr() for one in found}) == 12
    assert watched.pytorch.evidence()[0][runtime].startswith("12 calls")
    assert not watched.listener.failures


def test_nobody_is_told_of_a_conversion(watch, monkeypatch):
    telemetry = pytest.importorskip("openvino_telemetry.utils.sender", reason="needs openvino")
    told = []
    monkeypatch.setattr(telemetry.TelemetrySender, "send", lambda self, *args: told.append(args))
    watched, net = watch(), Net().eval()
    under("openvino", watched, net)
    answers(net, 3)
    assert watched.pytorch.evidence()[0]["openvino"] and not told


def test_signals_reach_the_script_though_two_models_of_openvino_have_gone_in_the_order_in_which_they_came(tmp_path):
    pytest.importorskip("openvino")
    asked = f"""
import gc, signal, torch
from pathlib import Path
from flatout.frameworks.pytorch.levers import registry
runtime, here = registry()["openvino"].runtime({{}}), Path({str(tmp_path)!r})
runtime.convert(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(1, 4),)), here)
first, second = runtime.load(here), runtime.load(here)
del first
gc.collect()
del second
gc.collect()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_onnxruntime_is_loaded_without_its_reports_and_not_at_all_where_something_is_trained(watch, tmp_path):
    pytest.importorskip("onnxruntime")
    asked = """
import os
from flatout.frameworks.pytorch.levers import registry
registry()["onnxruntime"].runtime({})
held = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
print([one for one in held if "onnxruntime.db" in one], "ORT_DISABLE_TELEMETRY" in os.environ)
"""
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[] False\n" and not list(tmp_path.rglob("*.db"))
    watched, net = watch({"onnxruntime": {}}), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(8):
        net(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    watched.pytorch.engage({"onnxruntime": {}, "inference_mode": {}})
    assert not watched.pytorch.engaged() and "trains" in watched.pytorch.session.unavailable["onnxruntime"]


def test_each_kind_of_inputs_is_exported_for_itself_and_few_of_them(watch, runtime):
    watched, net = watch(), Net().eval()
    exported = under(runtime, watched, net)
    for batch in (1, 3, 1, 3, 1, 3):
        (found,) = answers(net, 1, batch=batch)
        watched.pytorch.engage({})
        (true,) = answers(net, 1, batch=batch)
        watched.pytorch.engage({runtime: {}})
        assert torch.allclose(found, true, rtol=1e-4, atol=1e-5)
    assert exported.num_calls == 6 and not exported.num_plain
    for batch in range(4, 9):
        answers(net, 1, batch=batch)
    assert exported.num_calls == 8 and exported.num_plain == {"other shapes or types": 3}


def test_another_thread_that_calls_the_model_while_it_is_exported_gets_its_answers(watch, runtime):
    watched, net = watch(), Net().eval()
    answers(net, 12)
    x, found, over = torch.ones(2, 3, 8, 8), [], threading.Event()
    with torch.no_grad():
        true = net(x)

    def call():
        with torch.no_grad():
            while not over.is_set():
                found.append(net(x))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        watched.pytorch.engage({runtime: {}})
        for batch in (1, 2, 3):
            answers(net, 1, batch=batch)
    finally:
        over.set()
        thread.join()
    assert found and all(torch.allclose(one, true, rtol=1e-4, atol=1e-5) for one in found)
    assert watched.pytorch.evidence()[0][runtime].endswith(f"calls by {runtime} {version(runtime)}")  # and all by it


def test_the_model_answers_where_its_weights_have_changed_or_it_trains(watch, runtime):
    watched, net = watch(), Net().eval()
    exported = under(runtime, watched, net)
    answers(net, 5)
    num = exported.num_calls
    assert num
    net.load_state_dict(Net().state_dict())
    (found,) = answers(net, 1)
    watched.pytorch.engage({})
    assert torch.equal(found, answers(net, 1)[0]) and exported.num_calls == num
    assert exported.num_plain["the weights have changed since"] == 1


def test_a_torn_file_is_made_anew(watch, runtime, tmp_path):
    watched, net = watch(), Net().eval()
    watched.pytorch.session.cache_folder = str(tmp_path)
    under(runtime, watched, net)
    true = answers(net, 5)
    for file in tmp_path.rglob("model.*"):
        file.write_bytes(b"torn")
    watched.pytorch.detach()
    other = watch()
    other.pytorch.session.cache_folder = str(tmp_path)
    under(runtime, other, net.eval())
    found = answers(net, 5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, true, strict=True))


@pytest.mark.parametrize("kind", ["hook", "training part", "writes"])
def test_a_model_of_which_more_is_asked_is_refused_by_name_and_answers_itself(kind, watch, runtime):
    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("num", torch.zeros(()))

        def forward(self, x):
            self.num.add_(1)
            return super().forward(x)

    watch.may_fail = True
    watched, net = watch(), (Counts() if kind == "writes" else Net()).eval()
    answers(net, 12)
    if kind == "hook":
        net.head.register_forward_hook(lambda *_: None)
    elif kind == "training part":
        net.body.train()
    watched.pytorch.engage({runtime: {}})
    assert len(answers(net, 5)) == 5
    ((stage, problem), *_) = watched.listener.failures
    assert stage == "step" and type(problem).__name__ == "NotExported"
    assert not watched.pytorch.engaged()
