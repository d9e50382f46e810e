"""Between two looks nothing but ends of steps is followed: are they all told, and is everything there again after?"""

import signal
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from flatout import observe  # noqa: E402
from flatout.errors import UsageError  # noqa: E402
from flatout.frameworks.pytorch.seams.update_hooks import UpdateHook  # noqa: E402
from flatout.guest.tracebacks import HERE  # noqa: E402

SEAM = "_compiled_call_impl"


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def coasting_after(watched, make_step, num=60):
    """Steps that are followed, until it is known for long what a step is; from then on nobody looks."""
    for _ in range(num):
        make_step()
    watched.pytorch.coast()


def step(model, optimizer):
    model(torch.randn(3, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_is_called_directly_while_nobody_asks_and_seen_again_when_somebody_does(watch, workload):
    watched, script = watch(), workload("mlp")
    seen = []
    script.train(8)
    watched.pytorch.coast()
    seen.append(SEAM in vars(script.model))
    script.train(50)
    watched.pytorch.observe("phases")
    seen.append(SEAM in vars(script.model))
    watched.pytorch.start_window()
    script.train(2)
    phases = watched.listener.last.phases
    assert seen == [False, True] and {"forward", "backward", "optimizer"} <= set(phases)
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 60


def test_where_ends_alone_are_observed_evaluation_lies_outside_and_only_hooks_are_light(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.observe("ends")
    watched.pytorch.start_window()
    outside = []
    watched.listener.each_step = lambda _: outside.append(watched.listener.last)
    script.train(2)
    with torch.no_grad():
        script.model(torch.randn(64, 10))
    script.train(1)
    assert watched.pytorch.steps.coasts and SEAM in vars(script.model)
    assert [step.outside_s > 0 for step in outside] == [False, False, True]
    assert [dict(step.phases) for step in outside[:2]] == [{}, {}], "of a training step nothing is taken apart"
    assert outside[2].phases == {"evaluation": outside[2].outside_s, "checkpoint": 0.0}


@pytest.mark.parametrize("depth", ["off", "ends", "phases"])
def test_a_process_that_is_followed_is_known_to_be_however_lightly(watch, workload, depth):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.coast() if depth == "off" else watched.pytorch.observe(depth)
    with pytest.raises(UsageError, match="observed already"), observe():
        pass


@pytest.mark.parametrize("depth", ["off", "phases"])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_an_interruption_while_a_step_is_told_of_shows_no_frame_of_ours(watch, workload, depth, raised):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.coast() if depth == "off" else watched.pytorch.observe(depth)

    def interrupt(number, frame):
        raise raised

    watched.listener.each_step = lambda _: signal.raise_signal(signal.SIGALRM)
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(raised) as caught:
            script.train(1)
    finally:
        signal.signal(signal.SIGALRM, former)
        watched.listener.each_step = None
    files = {str(frame.path) for frame in caught.traceback}
    assert not [file for file in files if file.startswith(HERE)] and not watched.listener.failures
    script.train(2)
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == 11


def test_levers_go_on_while_nobody_looks(watch, workload):
    watched, script = watch(), workload("mlp")
    watched.engage(4, {"channels_last": {}, "bf16": {}, "fused_optimizer": {}})
    script.train(10)
    session = watched.pytorch.session
    watched.pytorch.coast()
    made, acts, calls = session.flags.num_updates, [], watched.pytorch.calls.found[0].num_training_calls
    session.at_step_end["test"] = lambda: acts.append(1)
    script.train(40)
    del session.at_step_end["test"]
    assert session.flags.num_updates == made + 40 and len(acts) == 40
    assert watched.pytorch.calls.found[0].num_training_calls >= calls + 40, "bf16 is computed through the seam"
    assert all("fused" not in group or group["fused"] is None for group in script.optimizer.param_groups)


def test_levers_reach_an_optimizer_that_comes_while_nobody_looks(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watched.engage(4, {"fused_optimizer": {}})
    coasting_after(watched, lambda: step(model, optimizer))
    other = mlp()
    later = torch.optim.Adam(other.parameters(), lr=1e-3)
    for _ in range(20):
        step(other, later)
    assert watched.pytorch.session.flags.num_optimizers("fused") == 2
    assert SEAM in vars(other) and not watched.pytorch.steps.coasts


def test_an_optimizer_that_comes_where_no_lever_is_engaged_wakes_nobody(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    coasting_after(watched, lambda: step(model, optimizer))
    other = mlp()
    later = torch.optim.SGD(other.parameters(), lr=1e-3)
    before = watched.listener.num_steps
    for _ in range(20):
        step(other, later)
    assert watched.pytorch.steps.coasts and SEAM not in vars(other)
    assert watched.listener.num_steps - before >= 10, "one that has gone quiet is not waited for"


def test_steps_of_two_optimizers_and_of_groups_added_are_told_while_nobody_looks(watch):
    watched, one, two = watch(), mlp(), mlp()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (one, two)]

    def both():
        step(one, optimizers[0])
        step(two, optimizers[1])

    coasting_after(watched, both)
    before = watched.listener.num_steps
    for _ in range(30):
        both()
    optimizers[0].add_param_group({"params": list(mlp().parameters())})
    for _ in range(30):
        both()
    assert watched.listener.num_steps - before == 60


def test_updates_of_another_thread_are_no_steps_while_nobody_looks(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    coasting_after(watched, lambda: step(model, optimizer))
    before, other = watched.listener.num_steps, mlp()
    worker = threading.Thread(target=lambda: step(other, torch.optim.SGD(other.parameters(), lr=1e-3)))
    worker.start()
    worker.join()
    assert watched.listener.num_steps == before


def test_loaders_are_plain_while_no_lever_fetches_and_followed_again_after(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(torch.randn(40, 4), batch_size=4)

    def is_ours():
        return DataLoader.__iter__.__module__.startswith("flatout")

    def epoch():
        for rows in loader:
            model(rows).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    coasting_after(watched, epoch, num=6)
    assert not is_ours()
    epoch()
    watched.pytorch.observe("ends")
    assert is_ours()
    assert watched.pytorch.facts().loaders[0].num_batches == 10


def test_a_scaler_that_skips_an_update_ends_a_step_while_nobody_looks(watch):
    watched, model = watch(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def scaled(broken):
        scaler.scale(model(torch.randn(3, 4)).pow(2).mean()).backward()
        if broken:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    coasting_after(watched, lambda: scaled(False))
    before = watched.listener.num_steps
    for number in range(20):
        scaled(number % 4 == 0)
    assert watched.listener.num_steps - before == 20


def test_a_lever_that_breaks_at_a_steps_end_is_told_of_and_training_goes_on(watch, workload):
    watch.may_fail = True
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.coast()

    def broken():
        raise RuntimeError("broken")

    watched.pytorch.session.at_step_end["test"] = broken
    script.train(3)
    del watched.pytorch.session.at_step_end["test"]
    assert [str(problem) for _, problem in watched.listener.failures] == ["broken"] * 3


# -- hooks of the script's own -------------------------------------------------------------------------------------


@pytest.fixture
def script_hooks():
    """Hooks of the script's own for all optimizers, which come after ours."""
    told, handles = [], []

    def register():
        handles.append(register_optimizer_step_pre_hook(lambda *_: told.append("before")))
        handles.append(register_optimizer_step_post_hook(lambda *_: told.append("after")))
        return told

    yield register
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("change", ["coast", "observe", "engage", "detach"])
def test_whatever_changes_within_an_update_the_scripts_own_hooks_are_called(watch, workload, script_hooks, change):
    watched, script = watch(), workload("mlp")
    told = script_hooks()
    acts = {
        "coast": watched.pytorch.coast,
        "observe": lambda: (watched.pytorch.coast(), watched.pytorch.observe("phases")),
        "engage": lambda: (watched.pytorch.coast(), watched.pytorch.engage({"fused_optimizer": {}})),
        "detach": watched.pytorch.detach,
    }
    watched.at(6, acts[change])
    script.train(12)
    assert told == ["before", "after"] * 12


def test_a_hook_is_taken_away_outside_of_updates_and_called_no_more_within_one(script_hooks):
    model, calls, hooks = mlp(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    registry = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = len(registry)

    def once(*_):
        calls.append(1)
        hooks[0].remove()

    hooks.append(UpdateHook(register_optimizer_step_post_hook, once))
    hooks.append(UpdateHook(register_optimizer_step_post_hook, lambda *_: calls.append(2)))
    script_hooks()
    for _ in range(2):
        step(model, optimizer)
    assert calls == [1, 2, 2]
    for hook in hooks:
        hook.remove()
    assert len(registry) == before + 1, "the script's own"
