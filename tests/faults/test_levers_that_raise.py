"""A lever that raises, as it engages, in a step, or as it is released: training goes on, a trial has failed."""

import re
from pathlib import Path

import pytest

from faulting import copied, flatout, last_lines, left_behind, plain
from flatout.machine.read import read_machine
from flatout.records.plan import Candidate
from flatout.run.script import Script
from flatout.trials.conduct import Conduct
from flatout.trials.terms import Goal, Show, Terms

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


def printed(text):
    """Bad batches, the sum over parameters and buffers, and the next random number of a run of `faulty.py`."""
    bad, total, number = re.fullmatch(r"(\d+) bad, (\S+), (\S+)", text.strip()).groups()
    return int(bad), float(total), number


@pytest.fixture(scope="module")
def unplanted():
    return plain(str(Path(__file__).parent.parent / "scripts" / "faulty.py")).stdout


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        pytest.param("engage", "engage", marks=pytest.mark.smoke),
        ("first call", "step"),
        ("later call", "step"),
        ("release", "release"),
    ],
)
def test_a_run_goes_on_without_levers_that_raise_and_says_so(folder, unplanted, place, stage):
    copied("faulty.py", folder)
    ours = flatout("run", "--levers", "bf16", "faulty.py", place, "4000" if place == "release" else "400")
    assert ours.returncode == 0, ours.stderr
    assert "Traceback" not in ours.stderr
    assert f"{stage} failed, running on without" in ours.stderr and f"planted: {place}" in ours.stderr
    assert "the levers were released" in ours.stderr
    if place in ("engage", "first call"):  # whose state is put back: not a bit differs from plain
        assert ours.stdout == unplanted
    if place == "later call":  # batch statistics have seen one batch twice, random numbers none
        assert printed(ours.stdout)[2] == printed(unplanted)[2]
    assert left_behind(folder) == []


def test_what_the_script_raises_and_catches_itself_costs_it_no_lever_and_no_random_number(folder):
    copied("faulty.py", folder)
    ours = flatout("run", "--levers", "bf16", "faulty.py", "own")
    assert ours.returncode == 0, ours.stderr
    assert "failed" not in ours.stderr and "released" not in ours.stderr
    bad, _, number = printed(ours.stdout)
    before, _, expected = printed(plain("faulty.py", "own").stdout)
    assert (bad, number) == (before, expected) == (8, expected)


def test_what_raises_in_backward_is_the_scripts_to_see_and_the_levers_are_named(folder):
    copied("faulty.py", folder)
    ours = flatout("run", "--levers", "bf16", "faulty.py", "backward")
    assert ours.returncode == 1
    assert "RuntimeError: planted: backward" in ours.stderr
    assert last_lines(ours)[-1] == "it raised RuntimeError under bf16: `--levers none` tells whether plain does"


def test_a_compiler_that_is_broken_costs_the_lever_alone(folder, unplanted):
    copied("faulty.py", folder)
    cache = str(folder / "kernels")
    ours = flatout("run", "--levers", "compile", "faulty.py", CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=cache)
    assert ours.returncode == 0 and "Traceback" not in ours.stderr, ours.stderr
    assert "step failed, running on without" in ours.stderr
    assert ours.stdout == unplanted


# -- in this very process ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.bad = False

    def forward(self, x):
        out = self.body(x)
        if self.bad:
            raise KeyError("a bad batch")
        return out


@pytest.fixture
def attached():
    """A framework attached to a model that has trained for some steps, and what it was told of failures."""
    from flatout.frameworks.pytorch.adapter import PyTorch

    torch.manual_seed(0)
    failures = []

    class Listener:
        def on_step(self, step):
            pass

        def on_update(self):
            pass

        def on_pass_end(self):
            pass

        def on_failure(self, stage, problem):
            failures.append((stage, type(problem).__name__, str(problem)))

    pytorch = PyTorch()
    pytorch.prepare({}, trial=False)
    pytorch.attach(Listener())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(num=1):
        for _ in range(num):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    train(8)
    yield pytorch, model, train, failures
    pytorch.detach()


@pytest.mark.smoke
def test_one_lever_that_cannot_be_released_does_not_keep_the_others(attached, monkeypatch):
    from flatout.frameworks.contract import NotReleased
    from flatout.frameworks.pytorch.levers.bf16 import Bf16

    pytorch, _, train, _ = attached
    threads = torch.get_num_threads()
    pytorch.engage({"threads": {"num": threads + 1}, "bf16": {}, "fused_optimizer": {}})
    monkeypatch.setattr(Bf16, "release", lambda self, session: 1 / 0)
    with pytest.raises(NotReleased, match="bf16: ZeroDivisionError"):
        pytorch.engage({})
    assert pytorch.engaged() == {} and torch.get_num_threads() == threads
    assert all(not call.arounds and call.compute is None for call in pytorch.calls.found)
    monkeypatch.undo()
    train(3)


@pytest.mark.smoke
def test_a_step_that_breaks_under_levers_that_cannot_be_released_either_is_made_plainly(attached, monkeypatch):
    from flatout.frameworks.pytorch.levers.bf16 import Bf16

    pytorch, _, train, failures = attached
    pytorch.engage({"bf16": {}})
    (call,) = pytorch.calls.found
    call.arounds["bf16"] = lambda compute, args, kwargs: 1 / 0
    monkeypatch.setattr(Bf16, "release", lambda self, session: {}["gone"])
    train(3)
    assert [stage for stage, *_ in failures] == ["release", "step"]
    assert pytorch.engaged() == {} and not call.arounds
    monkeypatch.undo()


@pytest.mark.smoke
def test_what_breaks_holds_no_memory_while_the_call_is_made_again(attached):
    import gc
    import weakref

    pytorch, model, train, failures = attached
    pytorch.engage({"bf16": {}})
    (call,) = pytorch.calls.found
    held, alive = [], []

    def around(compute, args, kwargs):
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    call.arounds["bf16"] = around
    model.body.register_forward_hook(lambda *_: (gc.collect() and None) or alive.append(held[0]() is not None))
    train(1)
    assert alive == [False]
    assert failures == [("step", "OutOfMemoryError", "CUDA out of memory")]


@pytest.mark.smoke
def test_levers_are_back_after_an_exception_of_the_scripts_own(attached):
    pytorch, model, train, failures = attached
    pytorch.engage({"bf16": {}})
    model.bad = True
    for _ in range(2):
        with pytest.raises(KeyError, match="a bad batch") as raised:
            train(1)
        assert raised.value.__context__ is None
        assert pytorch.engaged() == {"bf16": {}}
    model.bad = False
    train(2)
    assert failures == [] and pytorch.evidence()[0]["bf16"]


# -- in trials -----------------------------------------------------------------------------------------------------


@pytest.fixture
def conducted(folder):
    """What tries a lever on `faulty.py`, warmed up."""
    opened = []

    def start(*arguments):
        script = Script(path=str(copied("faulty.py", folder)), arguments=arguments)
        goal = Goal(terms=Terms(isolate=False))
        run_folder = folder / ".flatout" / "faulty-1"
        run_folder.mkdir(parents=True)
        conduct = Conduct(script, run_folder, read_machine(), goal, Show())
        opened.append(conduct.bench)
        conduct.bench.start()
        conduct.bench.settle()
        return conduct

    yield start
    for bench in opened:
        bench.end()


@pytest.mark.parametrize("place", ["engage", "later call", "release"])
def test_a_lever_that_raises_in_a_trial_is_a_failed_candidate_and_the_next_one_has_its_turn(conducted, folder, place):
    conduct = conducted(place, "1000000")
    conduct.budget.total_s = 600.0
    trial = conduct.try_out(Candidate(levers={"bf16": {}}))
    stage = "step" if place == "later call" else place
    assert trial.outcome == "failed"
    assert trial.reason.startswith(f"{stage}: ") and f"planted: {place}" in trial.reason
    assert conduct.bench.window({}, purpose="baseline").num_steps
    assert conduct.bench.window({"threads": {"num": 2}}, purpose="trial").levers == {"threads": {"num": 2}}
    conduct.bench.end()
    assert left_behind(folder) == []
