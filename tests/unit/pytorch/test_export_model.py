"""Do files of a model give what it gives, for inputs and batches that they were not made from?"""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch import export_model  # noqa: E402
from flatout.frameworks.pytorch.export_formats import FORMATS, exports  # noqa: E402

pytestmark = pytest.mark.usefixtures("whatever_runs_the_tests_trains")

RUNTIMES = [name for name, lacks in exports().items() if not lacks]


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, rows, *, scale, weights=None):
        return {"logits": self.body(rows["a"]) * scale, "best": (rows["b"].argmax(-1), None)}


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.register_buffer("num_seen", torch.zeros(1))

    def forward(self, x):
        self.num_seen += 1
        return self.body(x)


class OfFourRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x):
        return self.body(x.reshape(4, 4))


class DividesByRows(OfFourRows):
    def forward(self, x):
        return self.body(x) / float(x.numpy().shape[0]) if not torch.compiler.is_exporting() else self.body(x) / 4


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Eigen())

    def forward(self, x):
        return self.inner(x)


class Eigen(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x.unsqueeze(-1) * x.unsqueeze(-2)).abs()


def exported(watch, folder, model, make, to="torchscript"):
    """What the framework of a script that calls a model writes, by its contract."""
    watched, model, found = watch(), model.eval(), []

    def ask():
        one = watched.pytorch.export(to, folder)
        if one is None:  # calls of a further step
            watched.listener.waiting = ask
        else:
            found.append(one)

    def begin():
        watched.pytorch.begin_capture()
        watched.listener.waiting = ask

    watched.at(2, begin)
    with torch.no_grad():
        for _ in range(40):
            args, kwargs = make()
            model(*args, **kwargs)
    return found[0].models[0]


def images(batch):
    return lambda: ((torch.randn(batch, 1, 8, 8),), {})


def rows(batch=4):
    return lambda: ((torch.randn(batch, 4),), {})


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("to", RUNTIMES)
def test_a_model_is_exported_with_a_free_batch_and_checked_at_sizes_that_did_not_make_it(watch, tmp_path, to, batch):
    model = exported(watch, tmp_path, net(), images(batch), to)
    assert not model.refused and model.batch_is_free and model.batch == batch, model
    sizes = [one.batch for one in model.checks]
    assert sizes[0] == batch and len(set(sizes)) == 3 and max(batch, 2) not in sizes[1:]
    assert all(one.is_new and one.num_others == 0 and one.difference.error < 1e-5 for one in model.checks)


@pytest.mark.parametrize("to", RUNTIMES)
def test_the_loader_runs_alone_and_finds_the_models_answers(watch, tmp_path, to):
    model = exported(watch, tmp_path, net(), images(2), to)
    source = (tmp_path / model.name / "load.py").read_text()
    assert "flatout." not in source and (to == "torchscript") is ("torch" in source)
    done = subprocess.run([sys.executable, tmp_path / model.name / "load.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 answers equal" in done.stdout


@pytest.mark.parametrize("to", RUNTIMES)
def test_inputs_and_outputs_in_containers_become_tensors_in_their_order(watch, tmp_path, to):
    model = exported(
        watch, tmp_path, InParts(), lambda: (({"a": torch.randn(3, 4), "b": torch.randn(3, 4)},), {"scale": 2.0}), to
    )
    assert [one.shape for one in model.inputs] == [(3, 4), (3, 4)]
    assert [one.dtype for one in model.outputs] == ["float32", "int64"]
    assert model.batch_is_free and all(one.num_others == 0 and one.num_answers for one in model.checks)


def test_a_model_that_takes_one_number_of_rows_is_exported_for_that_and_says_so(watch, tmp_path):
    model = exported(watch, tmp_path, OfFourRows(), rows())
    assert not model.refused and not model.batch_is_free and model.why_fixed
    assert [one.batch for one in model.checks] == [4] and model.checks[0].is_new


def test_a_batch_that_was_built_in_is_found_at_an_unseen_size(watch, tmp_path):
    model = exported(watch, tmp_path, DividesByRows(), rows())
    assert not model.batch_is_free and "differ" in model.why_fixed and "batch of" in model.why_fixed
    assert [one.difference.error < 1e-5 for one in model.checks] == [True]


def test_a_model_that_writes_into_a_buffer_is_refused_by_its_name(watch, tmp_path):
    model = exported(watch, tmp_path, Writes(), rows())
    assert model.refused == "the model writes into `num_seen`" and not list(tmp_path.iterdir())


@pytest.mark.skipif("onnx" not in RUNTIMES, reason="ONNX Runtime is not installed")
def test_an_operator_that_a_runtime_does_not_have_is_named_with_its_module(watch, tmp_path):
    model = exported(watch, tmp_path, Unusual(), rows(), "onnx")
    assert model.refused == "the operator `aten.linalg_eig` of `inner.1` cannot be exported"


def test_inputs_that_never_change_are_not_called_new(watch, tmp_path):
    same = torch.randn(4, 4)
    model = exported(watch, tmp_path, nn.Linear(4, 3), lambda: ((same,), {}))
    assert not model.refused and not any(one.is_new for one in model.checks)


def test_a_wrong_file_is_not_kept(watch, tmp_path, monkeypatch):
    class Wrong:
        name = "wrong"

        def convert(self, program, path):
            (path / "model").write_text("")

        def load(self, path):
            return lambda tensors: [torch.zeros(len(tensors[0]), 3)]

    kind = FORMATS["torchscript"]
    wrong = type(kind)(packages=("torch",), extra="torch", runtime=lambda module, inputs: Wrong(), loader="")
    monkeypatch.setitem(export_model.FORMATS, "torchscript", wrong)
    model = exported(watch, tmp_path, nn.Linear(4, 3), rows())
    assert "differ" in model.refused and not list(tmp_path.iterdir())


def test_the_model_answers_as_before_once_it_is_exported(watch, tmp_path):
    model = nn.Linear(4, 3)
    exported(watch, tmp_path, model, rows())
    x = torch.randn(2, 4)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
