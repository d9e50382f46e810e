"""Does the framework tell of every step, whatever ends it, and leave PyTorch exactly as it found it?"""

import gc
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import warm

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.modules import module as modules  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from flatout.frameworks.contract import NotReleased  # noqa: E402
from flatout.frameworks.pytorch import steps  # noqa: E402
from flatout.frameworks.pytorch.levers.threads import Threads  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
KINDS = (
    torch, torch.autograd, torch.Tensor, torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch.amp.GradScaler,
    torch.cuda, nn.Module, nn.Linear, DataLoader, torch.utils.data, torch.random, modules, optimizers,
)  # fmt: skip


def everything():
    """Every attribute of what we might touch, and the contents of PyTorch's global hooks."""
    found = {(str(kind), name): value for kind in KINDS for name, value in vars(kind).items()}
    hooks = {
        name: list(vars(holder)[name])
        for holder in (modules, optimizers)
        for name in vars(holder)
        if name.startswith("_global") and isinstance(vars(holder)[name], dict)
    }
    return found, hooks


def untouched(before):
    found, hooks = everything()
    changed = [name for name, value in before[0].items() if found.get(name) is not value]
    return changed + [name for name in found if name not in before[0]] + [n for n in hooks if hooks[n] != before[1][n]]


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model, optimizer, loss=lambda out: out.pow(2).mean()):
    loss(model(torch.randn(3, 4))).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- what ends a step ----------------------------------------------------------------------------------------------


def test_every_update_is_a_step_from_the_third_on(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        step(model, optimizer)
    assert watched.listener.num_steps == 8
    assert watched.listener.stamps == sorted(watched.listener.stamps)
    facts = watched.pytorch.facts()
    assert watched.pytorch.steps.rhythm.num_updates == 1 and facts.step_rhythm == "optimizer"


def test_a_critic_that_updates_five_times_makes_one_step_with_the_generator(watch, monkeypatch):
    monkeypatch.undo()  # patience as it is
    watched, critic, maker = watch(), mlp(), nn.Linear(4, 4)
    optimizers = [torch.optim.RMSprop(m.parameters(), lr=1e-3) for m in (critic, maker)]
    gc.collect()
    for _ in range(10):
        for _ in range(5):
            step(critic, optimizers[0])
        step(lambda x: critic(maker(x)), optimizers[1])
    facts = watched.pytorch.facts()
    assert watched.pytorch.steps.rhythm.num_updates == 6 and 7 <= watched.listener.num_steps <= 9
    assert {model.name for model in facts.models} == {"Sequential", "Linear"}
    assert {model.name: model.calls_per_step for model in facts.models} == {"Sequential": 6, "Linear": 1}


def test_an_update_that_a_gradient_scaler_skips_ends_a_step_as_well(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    made = []
    optimizer.register_step_post_hook(lambda *_: made.append(1))
    for number in range(12):
        scaler.scale(model(torch.randn(3, 4)).pow(2).mean()).backward()
        if number in (6, 8):
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(made) == 10 and watched.listener.num_steps == 10
    assert watched.pytorch.facts().grad_scaler


def test_a_gradient_scaler_that_is_switched_off_is_none(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(8):
        scaler.scale(model(torch.randn(3, 4)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watched.listener.num_steps == 6 and not watched.pytorch.facts().grad_scaler


def test_a_closure_is_one_step_however_often_it_is_evaluated(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    evaluated = []

    def closure():
        evaluated.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).pow(2).mean()
        loss.backward()
        return loss

    for number in range(10):
        if number == 5:
            watched.pytorch.observe("phases")
        assert float(optimizer.step(closure)) >= 0
    assert watched.listener.num_steps == 8 and len(evaluated) > 10


def test_a_wrapper_around_an_optimizer_makes_one_step_of_both_updates(watch):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__([p for g in inner.param_groups for p in g["params"]], {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    watched, model = watch(), mlp()
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))
    watched.engage(4, {"fused_optimizer": {}})
    for _ in range(12):
        step(model, optimizer)
    assert watched.pytorch.steps.rhythm.num_updates == 1 and watched.listener.num_steps == 10
    assert watched.pytorch.session.flags.num_updates > 0


class Sharp(torch.optim.Optimizer):
    """Moves the parameters, evaluates the closure there, moves them back and lets another optimizer update."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.add_(0.01)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for parameter in parameters:
            parameter.sub_(0.01)
        self.inner.step()
        return loss


class Within(torch.optim.SGD):
    """Calls its base class, whose `step` PyTorch hooks as well once a plain one was made."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("order", ["coast", "phases", "ends"])
def test_an_update_that_calls_its_base_class_is_one_step(watch, order):
    watched, model = watch(), mlp()
    plain = torch.optim.SGD(mlp().parameters(), lr=0.1)
    optimizer = Within(model.parameters(), lr=0.01)
    watched.at(2, watched.pytorch.coast if order == "coast" else lambda: watched.pytorch.observe(order))
    for _ in range(10):
        step(model, optimizer)
    assert vars(torch.optim.SGD)["step"].hooked and plain is not None
    assert watched.listener.num_steps == 8 and watched.pytorch.steps.rhythm.num_updates == 1


@pytest.mark.parametrize("depth", ["ends", "phases"])
def test_an_update_within_another_one_keeps_nobody_waiting(watch, depth):
    watched, model = watch(), mlp()
    optimizer = Sharp(torch.optim.SGD(model.parameters(), lr=0.01))
    told = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).pow(2).mean()
        loss.backward()
        return loss

    def begin():
        watched.pytorch.begin_capture()
        watched.listener.waiting = lambda: told.append(len(watched.pytorch.capture.present))

    watched.at(2, lambda: watched.pytorch.observe(depth))
    watched.at(4, begin)
    for _ in range(10):
        closure()
        optimizer.step(closure)
    assert told == [2] and watched.listener.num_steps == 8


class Skip(Exception):
    """What a script raises in order to leave an update out."""


@pytest.mark.parametrize("order", ["coast", "phases", "ends"])
@pytest.mark.parametrize("inner", [True, False])
def test_updates_that_raise_and_are_caught_hide_no_later_one(watch, order, inner):
    class Catching(torch.optim.SGD):
        def step(self, closure=None):
            try:
                return super().step(closure)
            except Skip:
                return None

    watched, model = watch(), mlp()
    kinds = Catching if inner else torch.optim.SGD
    plain, optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1), kinds(model.parameters(), lr=0.01)
    calls = []

    def skip_some(*_):
        calls.append(1)
        if len(calls) % (4 if inner else 2) == 0:  # of the two calls in each step the inner one of every second step
            raise Skip

    optimizer.register_step_pre_hook(skip_some)
    watched.at(2, watched.pytorch.coast if order == "coast" else lambda: watched.pytorch.observe(order))
    for _ in range(16):
        try:
            step(model, optimizer)
        except Skip:
            assert not inner
    assert plain is not None and watched.listener.num_steps == (14 if inner else 6)


def test_a_schedule_that_wraps_the_optimizers_step_changes_nothing(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(8):
        step(model, optimizer)
        scheduler.step()
    assert watched.listener.num_steps == 6


# -- without an update that shows ----------------------------------------------------------------------------------


def by_hand(model, rate=0.01):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
            parameter.grad = None


def rows(num=40):
    return DataLoader(TensorDataset(torch.randn(num, 4)), batch_size=2, shuffle=True)


def test_updates_by_hand_make_a_step_of_each_batch_that_is_differentiated(watch):
    watched, model, loader = watch(), mlp(), rows()
    gc.collect()
    num, steps_before_epoch = 0, []
    assert watched.pytorch.training_since_s() is None
    begun_s = time.perf_counter()
    for _ in range(3):
        steps_before_epoch.append(watched.listener.num_steps)
        for (x,) in loader:
            model(x).pow(2).mean().backward()
            by_hand(model)
            num += 1
        with torch.no_grad():
            for (x,) in rows(8):
                model(x)
    facts = watched.pytorch.facts()
    assert facts.step_rhythm == "loader" and watched.pytorch.settled()
    assert watched.listener.num_steps == num - steps.BACKWARDS_WITHOUT_UPDATE + 1
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == num, "counted in the end"
    assert begun_s < watched.pytorch.training_since_s() < watched.listener.stamps[0]
    assert [model.name for model in facts.models] == ["Sequential"] and facts.optimizers == ()
    assert [loader.num_batches for loader in facts.loaders] == [20]


def test_updates_by_hand_are_counted_also_where_nothing_else_is_asked_for(watch):
    watched, model, loader = watch(), mlp(), rows()
    gc.collect()
    for _ in range(2):
        for (x,) in loader:
            model(x).pow(2).mean().backward()
            by_hand(model)
    before = watched.listener.num_steps
    watched.pytorch.coast()
    for (x,) in loader:
        model(x).pow(2).mean().backward()
        by_hand(model)
    assert watched.listener.num_steps == before + len(loader)


@pytest.mark.parametrize("with_loader", [True, False])
def test_updates_by_hand_are_compared_after_backward(watch, with_loader):
    watched, model = watch(), mlp()
    gc.collect()
    watched.compare(8, {"bf16": {}}, "gradients", "updates")
    for _ in range(3):
        for (x,) in rows() if with_loader else [(torch.randn(3, 4),) for _ in range(20)]:
            model(x).pow(2).mean().backward()
            by_hand(model)
    (answer,) = watched.answers
    found, _ = answer.differences
    assert found.explained_cosine == pytest.approx(1, abs=1e-9) and 0 < found.error < 0.1
    assert answer.missing == "no optimizer has gradients at this point"


def test_updates_by_hand_without_a_loader_make_a_step_of_each_call_after_a_backward(watch):
    watched, model = watch(), mlp()
    gc.collect()
    for number in range(60):
        model(torch.randn(3, 4)).pow(2).mean().backward()
        by_hand(model)
        if number % 10 == 9:
            with torch.no_grad():
                model(torch.randn(3, 4))
    assert watched.listener.num_steps == 60 - steps.BACKWARDS_WITHOUT_UPDATE
    facts = watched.pytorch.facts()
    assert facts.step_rhythm == "call" and facts.loaders == () and watched.pytorch.settled()


def test_gradients_accumulated_over_many_batches_are_not_taken_for_updates_by_hand(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(rows(4000))
    for _ in range(6):
        for _ in range(64):
            model(next(batches)[0]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watched.listener.num_steps == 4 and watched.pytorch.facts().step_rhythm == "optimizer"


def test_an_optimizer_that_appears_after_updates_by_hand_takes_over(watch):
    watched, model = watch(), mlp()
    gc.collect()
    for (x,) in rows(100):
        model(x).pow(2).mean().backward()
        by_hand(model)
    assert watched.pytorch.facts().step_rhythm == "loader"
    before = watched.listener.num_steps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in rows(20):
        model(x).pow(2).mean().backward()
        optimizer.step()
    assert watched.pytorch.facts().step_rhythm == "optimizer"
    assert watched.listener.num_steps == before + 8


@pytest.mark.parametrize("num", [3, 7])
def test_an_optimizer_made_anew_in_each_epoch_takes_the_place_of_the_former(watch, num):
    watched, generator, critic = watch(), mlp(), mlp()
    for _ in range(20):
        both = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (critic, generator)]
        for _ in range(num):
            for model, optimizer in zip((critic, generator), both, strict=True):
                model(torch.randn(2, 4)).pow(2).mean().backward()
                optimizer.step()
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 20 * num
    assert watched.pytorch.steps.rhythm.num_updates == 2


# -- never fatal ---------------------------------------------------------------------------------------------------


def test_a_problem_of_ours_is_told_and_training_goes_on(watch, monkeypatch):
    watch.may_fail = True
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fail(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(watched.pytorch, "meet", fail)
    monkeypatch.setattr(watched.pytorch.observer, "end_step", fail)
    before = next(model.parameters()).clone()
    for _ in range(6):
        step(model, optimizer)
    assert not torch.equal(before, next(model.parameters()))
    assert {(stage, type(problem)) for stage, problem in watched.listener.failures} == {("recorder", ZeroDivisionError)}


def test_an_exception_of_the_scripts_own_update_passes_through(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(8):
        if number == 4:
            with pytest.raises(TypeError):
                optimizer.step(closure=3)
        step(model, optimizer)
    assert watched.listener.num_steps == 6


def test_other_threads_that_train_something_make_no_steps(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        step(model, optimizer)

    def other():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            step(model, optimizer)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    for _ in range(4):
        step(model, optimizer)
    assert watched.listener.num_steps == 6


def test_watching_moves_no_random_number(watch, workload, different):
    plain = workload("conv").train(12).state()
    watched, script = watch(), workload("conv")
    watched.at(5, lambda: (watched.pytorch.observe("phases"), watched.pytorch.start_window()))
    watched.at(9, lambda: watched.pytorch.end_window())
    assert different(plain, script.train(12).state()) == []


# -- windows -------------------------------------------------------------------------------------------------------


def test_a_window_tells_its_losses_memory_and_epochs(watch):
    watched, model = watch(trial=True), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    windows = []
    batches = rows(6)
    for num, (x,) in enumerate(one for _ in range(6) for one in batches):
        optimizer.zero_grad()
        (model(x).sum() * 0 + num).backward()
        optimizer.step()
        if watched.listener.num_steps == 8:
            watched.pytorch.observe("phases")
            watched.pytorch.start_window()
        if watched.listener.num_steps == 14:
            windows.append(watched.pytorch.end_window())
            break
    (window,) = windows
    assert window["losses"] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert window["new_epochs"] == 2 and window["recompilations"] == 0 and window["device_phases"] == {}
    assert window["peak_memory_bytes"] > 10_000_000


def test_a_window_tells_how_often_each_step_called_the_model_and_not_where_it_was_once(watch):
    def told(*calls):
        watched, model = watch(trial=True), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for number, num in enumerate((1, 1, 1, 1, *calls)):
            if number == 4:
                watched.pytorch.start_window()
            sum(model(torch.ones(2, 4)).sum() for _ in range(num)).backward()
            with torch.no_grad():
                model(torch.ones(2, 4))
            optimizer.step()
        window = watched.pytorch.end_window()
        watched.pytorch.detach()
        return window["num_calls"]

    assert told(3, 1, 5) == (3, 1, 5)
    assert told(1, 1, 1) == ()


def test_the_stamps_of_a_window_and_the_parts_of_its_steps_are_one_account(watch, workload):
    watched, script = watch(), workload("conv")
    script.train(8)
    watched.pytorch.observe("phases")
    accounts = []
    watched.listener.each_step = lambda _: accounts.append(sum(watched.listener.last.phases.values()))
    begun = watched.pytorch.start_window()
    script.train(6)
    stamps = [begun, *watched.listener.stamps[-6:]]
    for account, one, other in zip(accounts, stamps, stamps[1:], strict=False):
        assert account == pytest.approx(other - one, abs=1e-9)


def test_operations_of_one_step_are_counted_between_two_boundaries(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.begin_census()
    script.train(1)
    census = watched.pytorch.end_census()
    # two batches of 16 rows: forward, gradients of weights, and of inputs except for the first layer
    products = [(10, 32), (32, 32), (32, 3)]
    wanted = 2 * 2 * 16 * sum((3 if (a, b) != (10, 32) else 2) * a * b for a, b in products)
    assert census.flops == wanted and census.num_operations > 20
    with pytest.raises(RuntimeError):
        watched.pytorch.end_census()


# -- leaving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["off", "ends", "phases", "reads"])
def test_detaching_leaves_pytorch_exactly_as_it_was(watch, workload, depth):
    workload("conv").train(2)  # PyTorch wraps functions of its own when the first optimizer is made and used
    before, random_state = everything(), random.getstate()
    watched, script = watch(), workload("conv")
    outer = dict(vars(script.model))
    watched.engage(4, {"bf16": {}, "channels_last": {}, "fused_optimizer": {}, "threads": {"num": 2}})
    watched.at(6, lambda: watched.pytorch.observe(depth))
    watched.at(7, watched.pytorch.begin_capture)
    script.train(12)
    assert untouched(before)
    watched.pytorch.detach()
    assert untouched(before) == []
    assert dict(vars(script.model)) == outer
    assert script.optimizer._optimizer_step_pre_hooks == {} and script.optimizer._optimizer_step_post_hooks == {}
    assert script.optimizer._optimizer_state_dict_post_hooks == {}
    assert torch.get_num_threads() == 1 and random.getstate() != () and random_state
    num = watched.listener.num_steps
    script.train(2)
    assert watched.listener.num_steps == num


def test_a_script_that_is_only_counted_has_two_hooks_of_ours_left_and_is_told_of_by_them(watch, workload):
    workload("conv").train(2)
    before = everything()
    watched, script = watch(), workload("conv")
    outer = dict(vars(script.model))
    watched.at(6, watched.pytorch.coast)
    script.train(12)
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 12
    hooks = ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"]
    assert [name for name in untouched(before) if "GradScaler" not in str(name)] == hooks
    assert dict(vars(script.model)) == outer and watched.listener.last.phases == {}
    watched.pytorch.detach()
    assert untouched(before) == []


def test_detaching_in_the_middle_of_a_census_ends_it(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.begin_census()
    watched.pytorch.detach()
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None


def test_detaching_when_a_lever_cannot_be_released_takes_out_the_rest(watch, workload, monkeypatch):
    before = everything()
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage({"threads": {"num": 2}})
    lever = watched.pytorch.session.levers["threads"]
    release = lever.release
    monkeypatch.setattr(type(lever), "release", lambda self, session: release(session) or 1 / 0)
    with pytest.raises(NotReleased, match="threads: ZeroDivisionError: division by zero"):
        watched.pytorch.detach()
    assert untouched(before) == []


def test_what_a_signal_handler_raises_while_a_lever_is_released_is_the_scripts(watch, workload, monkeypatch):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage({"threads": {"num": 2}})
    release = Threads.release
    monkeypatch.setattr(Threads, "release", lambda *a: (release(*a), signal.raise_signal(signal.SIGUSR1)))

    def limit(number, frame):
        raise TimeoutError("the script's own limit")

    former = signal.signal(signal.SIGUSR1, limit)
    try:
        with pytest.raises(TimeoutError):
            watched.pytorch.engage({})
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert watched.pytorch.engaged() == {}


def test_attaching_and_detaching_again_and_again_leaves_no_layer_behind(watch):
    before = everything()
    for _ in range(3):
        watched, model = watch(), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(8):
            step(model, optimizer)
        watched.pytorch.observe("phases")
        step(model, optimizer)
        watched.pytorch.detach()
    assert untouched(before) == []


def test_two_frameworks_at_once_can_leave_in_the_order_in_which_they_came(watch):
    before = everything()
    first, second, model = watch(), watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for watched in (first, second):
        watched.pytorch.observe("phases")
    for _ in range(6):
        step(model, optimizer)
    assert first.listener.num_steps == second.listener.num_steps == 4
    first.pytorch.detach()
    step(model, optimizer)
    assert second.listener.num_steps == 5
    second.pytorch.detach()
    assert untouched(before) == []


@pytest.mark.slow
def test_a_whole_script_prints_the_same_watched_and_plain():
    script = SCRIPTS / "many_ways.py"
    plain = warm.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=True)
    watched = warm.run(
        [sys.executable, SCRIPTS / "under_levers.py", "{}", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert watched.stdout == plain.stdout and watched.stderr == plain.stderr
    assert F.relu is not None
