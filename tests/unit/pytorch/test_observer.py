"""Does each part of a step get its own time, with patches that go without a trace?"""

import functools
import math
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

PATCHED = (
    (torch.autograd, "backward"), (torch.autograd, "grad"), (torch.optim.Optimizer, "zero_grad"), (torch, "save"),
    (torch.amp.GradScaler, "step"), (torch.optim.SGD, "step"), (DataLoader, "__iter__"), (nn.Module, "zero_grad"),
    *((torch.Tensor, name) for name in ("item", "cpu", "to", "cuda", "tolist", "__bool__", "numpy", "backward")),
)  # fmt: skip


def functions():
    return [vars(holder).get(name) for holder, name in PATCHED]


def same(a, b):
    return all(x is y for x, y in zip(a, b, strict=True))


class Ticking:
    """Stands in for the wall clock: each reading is one later than the last, plus what the script says it took."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now

    def work(self, seconds):
        self.now += seconds


class Slow(nn.Module):
    def __init__(self, ticking):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.ticking = ticking

    def forward(self, x):
        self.ticking.work(200)
        return self.layer(x)


class SlowRows(TensorDataset):
    ticking = None

    def __getitem__(self, k):
        self.ticking.work(1000)
        return super().__getitem__(k)


@pytest.fixture
def timed(watch, monkeypatch):
    """A watched script on a clock of its own: `step(parts)` runs named parts of known length."""
    ticking = Ticking()
    watched = watch()
    monkeypatch.setattr(watched.pytorch.observer.clock, "_now", ticking)
    monkeypatch.setattr("flatout.frameworks.pytorch.observe.observer.perf_counter", ticking)
    return watched, ticking


def run(watched, ticking, body, num=4, warm=6):
    """Settle with plain steps, then observe phases for some steps of `body`; the phases of each step and outside it."""
    model = Slow(ticking)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Work:
        pass

    script = Work()
    script.model, script.optimizer, script.ticking = model, optimizer, ticking
    rows = SlowRows(torch.randn(400, 4))
    rows.ticking = ticking
    script.loader = iter(DataLoader(rows, batch_size=1))
    found = []
    for _ in range(warm):
        (x,) = next(script.loader)
        model(x).sum().backward()
        optimizer.step()
    watched.pytorch.observe("phases")
    watched.pytorch.start_window()
    watched.listener.each_step = lambda _: found.append(
        (watched.listener.stamps[-1], dict(watched.listener.last.phases), watched.listener.last.outside_s)
    )
    begun = ticking.now
    for _ in range(num):
        body(script)
    watched.listener.each_step = None
    losses = watched.pytorch.end_window()["losses"]
    return begun, found, losses


def roughly(phases, **wanted):
    """Each part has the time that was put into it, within the readings of the clock itself."""
    for name, seconds in wanted.items():
        assert abs(phases.get(name, 0.0) - seconds) < 40, f"{name}: {phases}"
    assert sum(phases.values()) - sum(wanted.values()) < 100, phases


def plain_step(script, x=None):
    if x is None:
        (x,) = next(script.loader)
    script.optimizer.zero_grad()
    loss = script.model(x).sum()
    script.ticking.work(300)
    loss.backward()
    script.optimizer.step()
    script.ticking.work(50)


def test_data_forward_and_loss_are_told_apart_and_the_account_is_closed(timed):
    begun, found, losses = run(*timed, plain_step)
    assert len(found) == 4 and len(losses) == 4
    last = begun
    for at, phases, outside_s in found:
        assert math.isclose(sum(phases.values()), at - last), "the parts sum to the step"
        assert outside_s == 0
        last = at
    roughly(found[1][1], data=1000, forward=200, loss=300, unattributed=50, backward=0, optimizer=0)


def busy_backwards(ticking, parts):
    """An identity whose derivative takes a while."""

    class Busy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            ticking.work(parts)
            return g

    return Busy.apply


def test_parts_of_backward_and_of_the_update_are_seen(timed):
    def body(script):
        (x,) = next(script.loader)
        hook = script.optimizer.register_step_pre_hook(lambda *_: timed[1].work(500))
        busy_backwards(timed[1], 400)(script.model(x)).sum().backward()
        script.optimizer.step()
        hook.remove()

    _, found, _ = run(*timed, body)
    roughly(found[1][1], data=1000, forward=200, backward=400, optimizer=500)


def test_what_lies_around_the_hooks_of_an_update_is_part_of_it(timed, monkeypatch):
    hooked = None

    def profiled(optimizer, *args, **kwargs):
        timed[1].work(150)
        result = hooked(optimizer, *args, **kwargs)
        timed[1].work(100)
        return result

    def body(script):
        nonlocal hooked
        if hooked is None:
            hooked = torch.optim.SGD.step
            monkeypatch.setattr(torch.optim.SGD, "step", profiled)
        plain_step(script)

    _, found, _ = run(*timed, body)
    roughly(found[2][1], data=1000, forward=200, loss=300, optimizer=250, unattributed=50)


def test_our_own_work_between_steps_is_a_row_of_its_own(timed):
    watched, ticking = timed

    def body(script):
        tell = watched.listener.each_step

        def telling(now_s):
            tell(now_s)
            ticking.work(80)

        watched.listener.each_step = telling
        plain_step(script)
        watched.listener.each_step = tell

    _, found, _ = run(watched, ticking, body)
    roughly(found[2][1], data=1000, forward=200, loss=300, recorder=80, unattributed=50)


def test_gradient_accumulation_is_one_step_with_the_last_loss(timed):
    def body(script):
        for _ in range(3):
            (x,) = next(script.loader)
            script.model(x).sum().backward()
        script.optimizer.step()

    _, found, losses = run(*timed, body)
    assert len(found) == 4 and len(losses) == 4
    roughly(found[1][1], data=3000, forward=600)


def test_two_optimizers_make_one_step(watch):
    watched = watch()
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (first, second)]

    def step():
        second(first(torch.randn(2, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(10):
        step()
    watched.pytorch.observe("phases")
    watched.pytorch.start_window()
    before = watched.listener.num_steps
    for _ in range(5):
        step()
    assert watched.listener.num_steps == before + 5
    phases = watched.listener.last.phases
    assert {"forward", "backward", "optimizer", "loss"} <= phases.keys() and "data" not in phases


def test_an_evaluation_between_steps_lies_outside_them(timed):
    evaluated = []

    def body(script):
        if len(evaluated) == 1:
            with torch.no_grad():
                for _ in range(3):
                    script.ticking.work(70)
                    script.model(torch.randn(1, 4))
        evaluated.append(1)
        plain_step(script)

    _, found, _ = run(*timed, body)
    outside = [outside_s for _, _, outside_s in found]
    assert outside[0] == outside[2] == outside[3] == 0
    assert outside[1] == pytest.approx(3 * 270 + 50, abs=40)
    roughly(found[1][1], evaluation=3 * 270 + 50, data=1000, forward=200, loss=300)


def test_an_evaluation_is_seen_at_the_shallow_depth_as_well(timed):
    watched, ticking = timed

    def body(script):
        watched.pytorch.observe("ends")
        plain_step(script, torch.randn(1, 4))
        with torch.no_grad():
            script.model(torch.randn(1, 4))

    _, found, _ = run(watched, ticking, body)
    assert found[-1][2] == pytest.approx(250, abs=40)
    roughly(found[-1][1], evaluation=250)


def test_what_of_an_evaluation_and_what_of_a_checkpoint_lies_between_steps_is_told_at_the_shallow_depth(
    timed, tmp_path
):
    watched, ticking = timed

    class Busy:
        def __reduce__(self):
            ticking.work(600)
            return int, (3,)

    def body(script):
        watched.pytorch.observe("ends")
        with torch.no_grad():
            script.model(torch.randn(1, 4))
        torch.save(Busy(), tmp_path / "checkpoint.pt")
        plain_step(script, torch.randn(1, 4))

    _, found, _ = run(watched, ticking, body)
    assert found[-1][1].keys() == {"evaluation", "checkpoint"}
    assert found[-1][1]["checkpoint"] == pytest.approx(600, abs=40)
    assert sum(found[-1][1].values()) == pytest.approx(found[-1][2])


def test_a_checkpoint_lies_outside_the_step(timed, tmp_path):
    def body(script):
        (x,) = next(script.loader)
        script.model(x).sum().backward()

        class Busy:
            def __reduce__(self):
                timed[1].work(600)
                return int, (3,)

        torch.save(Busy(), tmp_path / "checkpoint.pt")
        script.optimizer.step()

    _, found, _ = run(*timed, body)
    roughly(found[1][1], checkpoint=600, data=1000, forward=200)
    assert found[1][2] == pytest.approx(600, abs=40)


def test_sampling_in_every_step_belongs_to_the_step(watch):
    watched, model = watch(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        with torch.no_grad():
            target = model(torch.randn(2, 4))
        (model(torch.randn(2, 4)) - target).pow(2).mean().backward()
        optimizer.step()

    for _ in range(10):
        step()
    (call,) = watched.pytorch.calls.found
    assert call.in_each_step
    watched.pytorch.observe("phases")
    watched.pytorch.start_window()
    step()
    phases, outside_s = watched.listener.last.phases, watched.listener.last.outside_s
    assert outside_s == 0 and "evaluation" not in phases


def test_gradients_asked_for_by_name_are_backward(timed):
    def body(script):
        (x,) = next(script.loader)
        parameters = list(script.model.parameters())
        gradients = torch.autograd.grad(busy_backwards(timed[1], 400)(script.model(x)).sum(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        script.optimizer.step()

    _, found, losses = run(*timed, body)
    roughly(found[1][1], backward=400, data=1000, forward=200)
    assert losses == []


def test_a_closure_within_the_update_is_told_apart_from_it(timed):
    def body(script):
        (x,) = next(script.loader)

        def closure():
            script.optimizer.zero_grad()
            loss = script.model(x).sum()
            script.ticking.work(300)
            loss.backward()
            return loss

        assert script.optimizer.step(closure).numel() == 1

    _, found, _ = run(*timed, body)
    roughly(found[1][1], data=1000, forward=200, loss=300, optimizer=0)


def test_an_exception_within_a_part_leaves_the_account_closed(timed):
    def body(script):
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                raise ValueError("the script's own")

        (x,) = next(script.loader)
        with pytest.raises(ValueError, match="the script's own"):
            Broken.apply(script.model(x)).sum().backward()
        plain_step(script)

    begun, found, _ = run(*timed, body)
    last = begun
    for at, phases, _ in found:
        assert math.isclose(sum(phases.values()), at - last)
        last = at
    roughly(found[1][1], data=2000, forward=400, loss=300)


def test_an_update_that_raised_spoils_no_later_step(timed):
    failing = []

    def body(script):
        failing.append(len(failing) == 1)
        if failing[-1]:
            with pytest.raises(TypeError):
                script.optimizer.step(closure=3)
        plain_step(script)

    _, found, _ = run(*timed, body)
    for _, phases, _ in found[2:]:
        roughly(phases, data=1000, forward=200, loss=300, optimizer=0)


class Skip(Exception):
    """What a script raises in order to leave an update out."""


def test_what_follows_an_update_that_raised_is_no_part_of_it(timed):
    calls = []

    def skip_some(*_):
        calls.append(1)
        if len(calls) % 2 == 0:
            raise Skip

    def body(script):
        if not calls:
            script.optimizer.register_step_pre_hook(skip_some)
        try:
            plain_step(script)
        except Skip:
            script.ticking.work(50)

    _, found, _ = run(*timed, body, num=9)
    assert len(found) == 5
    for _, phases, _ in found[1:]:
        roughly(phases, data=2000, forward=400, loss=600, unattributed=100, optimizer=0)


def test_an_update_within_another_one_is_time_of_the_optimizer(timed):
    ticking = timed[1]

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            ticking.work(100)
            self.inner.step(closure)
            ticking.work(400)

    outer = []

    def body(script):
        outer[:] = outer or [Outer(script.optimizer)]
        (x,) = next(script.loader)
        script.model(x).sum().backward()
        outer[0].step()
        ticking.work(70)

    _, found, _ = run(*timed, body, num=12)
    roughly(found[-1][1], data=1000, forward=200, optimizer=500, unattributed=70)


def test_an_optimizer_whose_step_is_no_function_is_left_as_it_is(watch, monkeypatch):
    class Own(torch.optim.SGD):
        pass

    watched, model = watch(), nn.Linear(4, 2)
    optimizer = Own(model.parameters(), lr=0.01)
    monkeypatch.setattr(Own, "step", functools.partialmethod(torch.optim.SGD.step, None))
    before = vars(Own)["step"]
    train(model, optimizer)
    steps = watched.listener.num_steps
    watched.pytorch.observe("phases")
    train(model, optimizer, num=3)
    assert vars(Own)["step"] is before and watched.listener.num_steps == steps + 3


# -- patches -------------------------------------------------------------------------------------------------------


def train(model, optimizer, num=8):
    for _ in range(num):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_observing_no_more_leaves_every_function_as_it_was(watch, device, monkeypatch):
    watched, model = watch(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer)
    watched.pytorch.observe("off")
    before = functions()
    if device == "cuda":  # its patches are those of a GPU; nothing is recorded on one
        monkeypatch.setattr(watched.pytorch.calls, "device", "cuda")
        monkeypatch.setattr("flatout.frameworks.pytorch.observe.observer.DeviceClock", lambda: None)
    for _ in range(2):
        watched.pytorch.observe("phases")
        assert not same(before, functions())
        if device == "cuda":
            assert vars(torch.Tensor)["item"] is not None and torch.ones(1).item() == 1
        else:
            train(model, optimizer, num=1)
            assert vars(torch.optim.SGD)["step"] is not before[PATCHED.index((torch.optim.SGD, "step"))]
        watched.pytorch.observe("ends")
        watched.pytorch.observe("off")
        assert same(before, functions())


def test_what_the_script_patches_on_top_stays_and_works(watch, monkeypatch):
    watched, model = watch(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer)
    watched.pytorch.observe("phases")
    ours, calls = torch.autograd.backward, []

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", theirs)
    watched.pytorch.observe("off")
    assert torch.autograd.backward is theirs
    spent = dict(watched.pytorch.observer.clock._spent)
    train(model, optimizer, num=3)
    assert len(calls) == 3
    assert "backward" not in spent and watched.pytorch.observer.clock._spent.get("backward") is None


def test_capturing_while_phases_are_observed_leaves_nothing_behind(watch):
    watched, model = watch(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer)
    watched.pytorch.observe("off")
    before = functions()
    watched.pytorch.observe("phases")
    watched.pytorch.begin_capture()
    watched.pytorch.observe("off")
    watched.pytorch.capture.drop()
    assert same(before, functions())


def test_other_threads_of_the_script_pass_through_unseen(timed):
    watched, ticking = timed

    def body(script):
        (x,) = next(script.loader)

        def other():
            weight = torch.ones(2, requires_grad=True)
            ticking.work(5)
            (weight * 2).sum().backward()
            torch.autograd.grad((weight * 2).sum(), weight)
            script.model(torch.randn(1, 4))
            list(DataLoader(TensorDataset(torch.ones(3)), batch_size=1))
            torch.optim.SGD([weight], lr=0.1).step()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        plain_step(script, x)

    before = watched.listener.num_steps
    _, found, _ = run(watched, ticking, body)
    assert len(found) == 4 and watched.listener.num_steps == before + 8
    roughly(found[1][1], data=1000, forward=200, loss=300, backward=0, unattributed=50 + 5 + 200)
