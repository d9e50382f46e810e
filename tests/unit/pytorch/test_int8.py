"""Is a model in 8-bit integers fitted to the script's first inputs, and judged by its answers to others?"""

import logging
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from answering import Net  # noqa: E402
from flatout.frameworks.pytorch import quantize  # noqa: E402
from flatout.frameworks.pytorch.levers.int8 import NEEDED, Int8  # noqa: E402
from flatout.judge.agreement import judge  # noqa: E402

pytestmark = pytest.mark.usefixtures("whatever_runs_the_tests_trains")

RUNTIMES = pytest.mark.parametrize("levers", [*NEEDED], indirect=True)


@pytest.fixture
def levers(request):
    """One runtime; where a test says nothing it is ONNX Runtime, for NNCF takes seconds to begin."""
    return engaging(getattr(request, "param", "onnxruntime"))


def engaging(runtime):
    packages, extra = NEEDED[runtime]
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'flatout[{extra}]'")
    return {"int8": {"runtime": runtime}}


class Shapes(nn.Module):
    """Nothing that multiplies matrices."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 8, 8))

    def forward(self, x):
        return torch.relu(x * self.scale).flatten(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(24, 32, 2, batch_first=True), nn.Linear(32, 100)
        with torch.no_grad():
            for weight in self.layers.parameters():
                weight *= 4

    def forward(self, x):
        return self.head(self.layers(x.flatten(2).reshape(len(x), 8, 24))[0][:, -1])


@pytest.fixture(scope="module")
def inputs():
    return torch.randn(200, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def begun(watch, net, folder, *, tries=True):
    """A script that infers, whose lever keeps what it makes in a folder; in a trial or in a run."""
    watched = watch()
    watched.pytorch.session.cache_folder = str(folder)
    watched.pytorch.session.loaders.studies = tries
    called(net.eval(), torch.zeros(12, 4, 3, 8, 8))
    return watched


def called(net, inputs):
    with torch.no_grad():
        return [net(one) for one in inputs]


def refused(watch, net, folder, inputs, levers):
    """What was said first of a model that is not computed in integers, and what is engaged then."""
    watch.may_fail = True
    watched = begun(watch, net, folder)
    engaged(watched, levers)
    called(net, inputs)
    ((_, problem), *_) = watched.listener.failures
    return str(problem), watched.pytorch.engaged()


def engaged(watched, levers):
    watched.pytorch.engage(levers)
    return watched.pytorch.calls.found[0].compute


def evidence(watched):
    return watched.pytorch.evidence()[0]["int8"]


@RUNTIMES
def test_the_first_different_inputs_calibrate_it_and_later_calls_are_in_integers(watch, tmp_path, inputs, levers):
    net = Net()
    watched = begun(watch, net, tmp_path)
    true = called(net, inputs[:40])
    call = engaged(watched, levers)
    found = called(net, inputs[:40])
    assert call.num_plain == {"calibrating": 31} and call.num_calls == 9 and len(call.calibrated_with) == 32
    assert all(torch.equal(a, b) for a, b in zip(found[:31], true[:31], strict=True))
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found[31:], true[31:], strict=True)]
    assert 0 < max(errors) < 0.1
    assert "2 of 2 operators in int8" in evidence(watched) and "MB on disk for the model's" in evidence(watched)


@RUNTIMES
def test_answers_are_counted_over_steps_without_the_inputs_that_calibrated_it(watch, tmp_path, inputs, levers):
    net = Net()
    watched = begun(watch, net, tmp_path)
    engaged(watched, levers)
    called(net, inputs[:40])
    watched.compare(watched.listener.num_steps + 1, levers, "answers")
    called(net, [*inputs[:120], *inputs[:120]])
    answers = watched.difference("answers").answers
    assert (answers.num, answers.num_inputs, answers.num_shared) == (4 * (120 - 32), 120, 32)
    assert 0 <= answers.num_changed < 30 and answers.num_changed_by_rounding == 0


def test_numbers_that_are_not_those_of_the_model_disagree(watch, tmp_path, inputs, monkeypatch, levers):
    net = Net()
    watched = begun(watch, net, tmp_path)
    call = engaged(watched, levers)
    called(net, inputs[:40])
    (exported,) = call._kinds.values()
    honest = exported._run
    monkeypatch.setattr(exported, "_run", lambda tensors: [one.flip(-1) for one in honest(tensors)])
    watched.compare(watched.listener.num_steps + 1, levers, "answers")
    called(net, [*inputs[:120], *inputs[:120]])
    found = judge(watched.answers, "lossy", ("answers",))
    assert found.verdict == "disagrees" and "of 352 answers differ (at most" in found.detail


def test_no_number_where_the_model_has_one_disagrees(watch, tmp_path, inputs, monkeypatch, levers):
    net = Net()
    watched = begun(watch, net, tmp_path)
    call = engaged(watched, levers)
    called(net, inputs[:40])
    (exported,) = call._kinds.values()
    honest = exported._run
    monkeypatch.setattr(exported, "_run", lambda tensors: [one * float("nan") for one in honest(tensors)])
    watched.compare(watched.listener.num_steps + 1, levers, "answers")
    called(net, [*inputs[:120], *inputs[:120]])
    found = judge(watched.answers, "lossy", ("answers",))
    assert found.verdict == "disagrees" and "NaN" in found.detail


def test_too_few_different_inputs_are_refused_by_name(watch, tmp_path, inputs, levers):
    problem, still_engaged = refused(watch, Net(), tmp_path, [inputs[n % 20] for n in range(100)], levers)
    assert problem == "the script calls with 20 different inputs: too few to calibrate and to judge"
    assert not still_engaged


def test_inputs_without_a_number_calibrate_nothing(watch, tmp_path, inputs, levers):
    problem, _ = refused(watch, Net(), tmp_path, inputs[:100] * float("nan"), levers)
    assert problem.startswith("the script calls with 0 different inputs")


def test_too_few_other_inputs_judge_nothing(watch, tmp_path, inputs, levers):
    net = Net()
    watched = begun(watch, net, tmp_path)
    engaged(watched, levers)
    called(net, inputs[:40])
    watched.compare(watched.listener.num_steps + 1, levers, "answers")
    called(net, [inputs[n % 40] for n in range(200)])
    found = judge(watched.answers, "lossy", ("answers",))
    assert found.verdict == "inconclusive" and "40 different inputs: too few to calibrate and to judge" in found.detail


@RUNTIMES
def test_a_model_of_which_nothing_can_be_quantized_is_refused_by_name(watch, tmp_path, inputs, levers):
    problem, still_engaged = refused(watch, Shapes(), tmp_path, inputs[:40], levers)
    assert "quantizes none of it" in problem
    assert not still_engaged


@RUNTIMES
def test_a_run_loads_what_a_trial_made_and_calibrates_nothing(watch, tmp_path, inputs, levers):
    net = Net()
    watched = begun(watch, net, tmp_path)
    engaged(watched, levers)
    made = called(net, inputs[:40])[-1]
    watched.pytorch.detach()
    watched = begun(watch, net, tmp_path, tries=False)
    call = engaged(watched, levers)
    found = called(net, inputs[:40])
    assert call.num_calls == 40 and not call.num_plain and torch.equal(found[-1], made)


@RUNTIMES
def test_a_torn_artifact_is_calibrated_anew_by_a_trial_and_left_alone_by_a_run(watch, tmp_path, inputs, levers):
    net = Net()
    watched = begun(watch, net, tmp_path)
    engaged(watched, levers)
    called(net, inputs[:40])
    watched.pytorch.detach()
    (file,) = (*tmp_path.rglob("model.onnx"), *tmp_path.rglob("model.bin"))
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1  # it still loads, and nobody has judged it
    file.write_bytes(whole)
    watched = begun(watch, net, tmp_path, tries=False)
    call = engaged(watched, levers)
    true = called(net, inputs[:40])
    assert not call.num_calls and call.num_plain == {"its artifact is torn": 40}
    watched.pytorch.detach()
    watched = begun(watch, net, tmp_path)
    call = engaged(watched, levers)
    called(net, inputs[:40])
    assert call.num_calls == 9 and call.num_plain == {"calibrating": 31}
    assert len(true) == 40


def test_two_runtimes_are_judged_each_without_its_own_calibration_alone(watch, tmp_path, inputs):
    net = Net()
    watched = begun(watch, net, tmp_path)
    both = [engaging(name) for name in NEEDED]
    calls = []
    for levers in both:
        calls.append(engaged(watched, levers))
        called(net, inputs[40 * len(calls) :][:40])
    assert calls[0] is not calls[1] and not calls[0].calibrated_with & calls[1].calibrated_with
    for levers in both:
        watched.compare(watched.listener.num_steps + 1, levers, "answers")
        called(net, [*inputs[:140], *inputs[:140]])
        answers = watched.difference("answers").answers
        watched.answers.clear()
        assert (answers.num, answers.num_inputs, answers.num_shared) == (4 * (140 - 32), 140, 32)
    assert engaged(watched, both[0]) is calls[0]
    assert (
        evidence(watched).startswith(f"{9 + 140 - 32} calls by onnxruntime")
        and evidence(watched).count("operators") == 1
    )


def test_a_model_that_loses_answers_disagrees(watch, tmp_path):
    """A recurrence whose small errors grow."""
    net = Recurrent()
    inputs = torch.randn(200, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    levers = engaging("openvino")
    watched = begun(watch, net, tmp_path)
    engaged(watched, levers)
    called(net, inputs[:40])
    watched.compare(watched.listener.num_steps + 1, levers, "answers")
    called(net, [*inputs, *inputs])
    found = judge(watched.answers, "lossy", ("answers",))
    assert found.verdict == "disagrees" and "0 by rounding alone: up to 1 % is believed" in found.detail


def test_nncf_says_and_changes_nothing_in_the_scripts_process(watch, tmp_path, inputs, capfd):
    levers = engaging("openvino")
    before = state_of_the_process()
    net = Net()
    watched = begun(watch, net, tmp_path)
    engaged(watched, levers)
    called(net, inputs[:40])
    assert "operators in int8" in evidence(watched)
    assert state_of_the_process() == before and "nncf" not in sys.modules
    assert capfd.readouterr() == ("", "")


def state_of_the_process():
    return logging.getLoggerClass(), [*logging.root.handlers], logging.root.level, dict(os.environ)


def test_nncf_reports_to_nobody(tmp_path, monkeypatch):
    asked = []
    engaging("openvino")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: asked.append((command, options)) or failed())
    runtime = Int8().runtime({"runtime": "openvino"})
    with pytest.raises(RuntimeError, match="no such operation"):
        runtime.convert(torch.export.export(Net().eval(), (torch.zeros(4, 3, 8, 8),)), tmp_path)
    ((command, options),) = asked
    assert options["env"]["CI"] == "true" and command[1:3] == ["-I", quantize.__file__]


def failed():
    return subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: no such operation\n")


def test_what_is_not_installed_is_said_of_each_runtime_and_the_others_are_tried(watch, tmp_path, monkeypatch):
    lever, there = Int8(), {"onnxruntime", "onnx", "onnxscript", "openvino"}
    monkeypatch.setattr(
        "flatout.frameworks.pytorch.runtime_lever.find_spec", lambda name: name if name in there else None
    )
    assert lever.lacks(None) is None and lever.settings(None, None) == ({"runtime": "onnxruntime"},)
    net = Net()
    watched = begun(watch, net, tmp_path)
    watched.pytorch.engage({"int8": {"runtime": "openvino"}})
    assert watched.pytorch.evidence() == ({}, {"int8": "openvino not installed: `pip install 'flatout[nncf]'`"})
    there.clear()
    assert lever.settings(None, None) == ()
    wanted = {"onnxruntime": "onnx", "openvino": "nncf"}
    said = [f"{name} not installed: `pip install 'flatout[{extra}]'`" for name, extra in wanted.items()]
    assert lever.lacks(None) == "; ".join(said)
