"""Is every read of a value noted with its line and its time, and does nobody notice?"""

import copy
import inspect
import pickle
import threading

import pytest

torch = pytest.importorskip("torch")


from flatout.frameworks.pytorch.observe.read_recorder import FROM_DEVICE, READS, ReadRecorder  # noqa: E402
from flatout.frameworks.pytorch.seams import script_code  # noqa: E402
from flatout.frameworks.pytorch.seams.patches import Patch  # noqa: E402


class Clock:
    def __init__(self):
        self.now = 1.0

    def __call__(self):
        return self.now


class Recording:
    def __init__(self, **options):
        self.clock, self.failures = Clock(), []
        options = {"device": torch.device("cpu"), "now": self.clock, **options}
        self.recorder = ReadRecorder(
            threading.get_ident(), on_failure=lambda *what: self.failures.append(what), **options
        )

    def __enter__(self):
        self.recorder.start()
        return self

    def __exit__(self, *_):
        self.recorder.end_step()
        self.found = self.recorder.stop(1, 1.0)
        self.reads = [(row.line, row.read, row.num) for row in self.found.rows]
        if not self.failures:
            assert patched() == PLAIN


def patched():
    return {name: vars(torch.Tensor).get(name) for name in (*READS, *FROM_DEVICE)}


PLAIN = patched()


def here():
    return inspect.currentframe().f_back.f_lineno


@pytest.fixture
def waiting(monkeypatch):
    """Tensors whose `item` takes the time of a clock, as that of a device's value does."""

    def waits(clock, seconds):
        def make(original, patch):
            def item(self):
                clock.now += seconds
                return original(self)

            return item

        patches.append(Patch(torch.Tensor, "item", make))

    patches = []
    yield waits
    for patch in patches:
        patch.remove()


def test_each_read_is_noted_once_with_its_line_whatever_it_calls_itself(capsys):
    x = torch.tensor(2.0, requires_grad=True)
    with Recording() as recording:
        first = here()
        x.item()
        x.detach().tolist()
        float(x), int(x)
        if x > 1:
            pass
        print(f"{x:.1f}")
        print(x)
    assert capsys.readouterr().out == "2.0\ntensor(2., requires_grad=True)\n"
    assert sorted(recording.reads) == [
        (first + 1, "item", 1), (first + 2, "tolist", 1), (first + 3, "__float__", 1), (first + 3, "__int__", 1),
        (first + 4, "__bool__", 1), (first + 6, "__format__", 1), (first + 7, "__repr__", 1),
    ]  # fmt: skip
    assert {row.file for row in recording.found.rows} == {__file__}
    assert not any(row.on_device for row in recording.found.rows)


def test_the_wait_is_what_passes_within_the_read(waiting):
    recording = Recording()
    waiting(recording.clock, 0.04)
    x = torch.ones(())
    recording.recorder.start()
    for _ in range(3):
        recording.clock.now += 1.0
        x.item()
        recording.recorder.end_step()
    (row,) = recording.recorder.stop(3, 3.12).rows
    assert row.num == 3 and row.waited_s == pytest.approx(0.12)


def test_what_an_evaluation_reads_belongs_to_no_step():
    x = torch.ones(())
    recording = Recording()
    recording.recorder.start()
    recording.clock.now = 1.5
    x.item()
    recording.clock.now = 3.0
    x.tolist()
    recording.recorder.end_step(evaluated_until_s=2.0)
    assert [row.read for row in recording.recorder.stop().rows] == ["tolist"]


def test_a_read_within_a_library_is_given_to_the_line_that_called_it(monkeypatch):
    code = compile("def mean(x):\n    return x.item()\n", "/somewhere/site-packages/metrics.py", "exec")
    package = {}
    exec(code, package)
    monkeypatch.setattr(script_code, "INSTALLED", ("/somewhere/site-packages/",))
    with Recording() as recording:
        line = here() + 1
        package["mean"](torch.ones(()))
    (row,) = recording.found.rows
    assert row.line == line


def test_the_optimizers_own_step_counters_are_no_reads():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.Adam([parameter], foreach=False)
    with Recording() as recording:
        optimizer.step()
    assert recording.reads == []


def test_a_script_may_wait_for_its_device_without_naming_its_kind(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    with Recording(device=torch.device("cuda")) as recording:
        torch.accelerator.synchronize()
    (row,) = recording.found.rows
    assert (row.read, row.on_device) == ("synchronize", True)


def test_other_threads_are_not_noted():
    x = torch.ones(())
    with Recording() as recording:
        other = threading.Thread(target=x.item)
        other.start()
        other.join()
    assert recording.reads == []


def test_a_read_that_raises_raises_the_same_without_our_frames():
    x = torch.ones(3)
    with pytest.raises(RuntimeError) as plain:
        x.item()
    with pytest.raises(RuntimeError) as noted, Recording() as recording:
        x.item()
    assert str(noted.value) == str(plain.value) and recording.reads == []
    files = [entry.frame.code.path.name for entry in noted.traceback]
    assert "read_recorder.py" not in files


def test_where_noting_fails_values_are_read_on(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no frames here")

    monkeypatch.setattr("flatout.frameworks.pytorch.observe.read_recorder.script_frame", refuse)
    with Recording() as recording:
        assert torch.tensor(3).item() == 3
        assert torch.tensor(4).item() == 4
    assert [stage for stage, _ in recording.failures] == ["recorder"]
    assert recording.reads == [] and patched() == PLAIN


# -- nobody notices ------------------------------------------------------------------------------------------------


def test_values_stay_what_they_are_bit_for_bit():
    values = torch.tensor([1e-45, 0.1, float("inf"), -0.0, 3.0])
    before = [v.item() for v in values], [repr(v) for v in values], values.tolist(), values.numpy().tobytes()
    with Recording():
        noted = [v.item() for v in values], [repr(v) for v in values], values.tolist(), values.numpy().tobytes()
    assert noted == before and all(type(v) is float for v in noted[0])


def test_pickles_copies_scripts_and_compiled_functions_do_not_notice():
    x = torch.ones(3, requires_grad=True)

    def scaled(t):
        return t * 2 if t.sum().item() > 1 else t

    scripted_before = torch.jit.script(_scripted)
    with Recording() as recording:
        assert torch.equal(pickle.loads(pickle.dumps(x)), x) and torch.equal(copy.deepcopy(x), x)
        assert torch.jit.script(_scripted)(x).item() == scripted_before(x).item()
        compiled = torch.compile(scaled, backend="eager")
        assert torch.equal(compiled(x), scaled(x))
    assert torch.equal(compiled(x), scaled(x))
    assert not recording.failures


def test_a_compiled_function_has_the_same_graphs_with_and_without():
    counters = pytest.importorskip("torch._dynamo.utils").counters

    def shown(t):
        return t * 2 + t.sum().item()

    def num_graphs():
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(shown, backend="eager")
        for _ in range(3):
            compiled(torch.ones(3))
        return {name: dict(values) for name, values in counters.items() if name in ("stats", "frames")}

    plain = num_graphs()
    with Recording():
        assert num_graphs() == plain
    assert num_graphs() == plain


def _scripted(t: torch.Tensor) -> torch.Tensor:
    if t.sum().item() > 1 and bool(t.any()):
        return torch.nonzero(t).sum()
    return t.sum()


def test_a_window_notes_the_reads_of_its_steps_and_leaves_nothing(watch, workload):
    watched, script = watch(), workload("transformer")
    watched.pytorch.calls.thread = threading.get_ident()
    watched.at(6, lambda: watched.pytorch.observe("reads"))
    watched.at(6, watched.pytorch.start_window)
    watched.at(9, lambda: watched.answers.append(watched.pytorch.end_window()["host_reads"]))
    script.train(12)
    (found,) = watched.answers
    assert found is not None and patched() == PLAIN


def train(model, optimizer, on_line, num):
    shown, best = 0.0, 1e9
    for _ in range(num):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        on_line["printed"] = here() + 1
        shown += loss.item()
        on_line["stops"] = here() + 1
        value = loss.item()
        if value > best:
            return
    print(f"{shown / num:.3f}")


def test_two_lines_that_read_the_same_value_are_told_apart(watch):
    watched, lines = watch(), {}
    model = torch.nn.Linear(8, 1)
    watched.at(6, lambda: watched.pytorch.observe("reads"))
    watched.at(6, watched.pytorch.start_window)
    watched.at(10, lambda: watched.answers.append(watched.pytorch.end_window()["host_reads"]))
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), lines, 12)
    (noted,) = watched.answers
    assert sorted(row.line for row in noted.rows) == sorted(lines.values())
    assert [row.num for row in noted.rows] == [4, 4], "the reads of four steps"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_waits_are_those_that_pytorch_warns_of():
    """`torch.cuda.set_sync_debug_mode` is the oracle: a warning for every call that waits."""
    import warnings

    x = torch.ones(4, device="cuda")

    def body():
        x.sum().item()
        x.cpu()
        x.to("cpu")
        if x.sum() > 1:
            pass
        x.nonzero()
        x.to("cuda")
        x.to("cpu", non_blocking=True)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    with Recording(device=torch.device("cuda")) as recording:
        body()
    waits = {w.lineno for w in warned if "synchronizing CUDA operation" in str(w.message)}
    assert sorted(line for line, _, _ in recording.reads) == sorted(waits)
    assert all(row.on_device for row in recording.found.rows)


def test_a_subclass_is_told_of_the_function_of_pytorch_and_not_of_ours():
    told = []

    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            told.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    plain, tensor = torch.Tensor.item, torch.ones(1).as_subclass(Sub)
    with Recording():
        assert tensor.item() == 1.0
    assert plain in told and all(func is plain for func in told if func.__name__ == "item")
