"""Does `denormals` reach every thread that computes, undo itself in each, and apply where there is something?"""

import os
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.levers.denormals import Denormals, _flushed_share, _in_each_thread  # noqa: E402
from flatout.judge.agreement import judge  # noqa: E402
from flatout.trials.search.space import checks_of  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = {"denormals": {}}
TINY = 1e-40

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush denormals")


@pytest.fixture(autouse=True)
def denormals_are_computed_with_after_each_test():
    yield
    torch.set_flush_denormal(False)


def small(watch, change=lambda model, optimizer: None, num=8, make=lambda p: torch.optim.Adam(p, lr=1e-3)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 2))
    optimizer = make(model.parameters())
    watched = watch()

    def train(num):
        for _ in range(num):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).pow(2).mean().backward()
            change(model, optimizer)
            optimizer.step()

    train(num)
    return watched, model, train


# -- where it applies ----------------------------------------------------------------------------------------------


def test_a_model_of_normal_numbers_has_no_denormals_and_is_not_for_the_lever(watch):
    watched, _, _ = small(watch)
    facts = watched.pytorch.facts()
    assert facts.denormal_fraction == 0
    assert "no denormal number" in Denormals().applies(facts, MACHINE)


@pytest.mark.parametrize("what", ["parameter", "gradient", "buffer", "moment"])
def test_denormals_are_found_wherever_they_are_kept(what, watch):
    def change(model, optimizer):
        with torch.no_grad():
            if what == "parameter":
                model[0].weight[:6] = TINY
            elif what == "gradient":
                model[0].weight.grad[:6] = TINY
            elif what == "buffer":
                model[1].running_var.fill_(TINY)
            elif optimizer.state:
                optimizer.state[model[2].weight]["exp_avg_sq"].fill_(TINY)

    make = (lambda p: torch.optim.SGD(p, lr=0.0)) if what != "moment" else lambda p: torch.optim.Adam(p, lr=0.0)
    watched, model, _ = small(watch, change, make=make)
    if what == "moment":
        watched.pytorch.session.optimizers[0].state[model[2].weight]["exp_avg_sq"].fill_(TINY)
    if what == "buffer":
        model[1].running_var.fill_(TINY)
    facts = watched.pytorch.facts()
    assert 0 < facts.denormal_fraction < 1
    assert Denormals().applies(facts, MACHINE) is None


def test_the_share_is_that_of_the_elements(watch):
    watched, model, _ = small(watch, make=lambda p: torch.optim.SGD(p, lr=0.1))
    model.zero_grad()
    with torch.no_grad():
        model[0].weight.fill_(TINY)
    elements = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    expected = model[0].weight.numel() / sum(t.numel() for t in elements)
    assert watched.pytorch.facts().denormal_fraction == pytest.approx(expected)


def test_zeros_and_numbers_of_half_precision_are_no_denormals(watch):
    watched, model, _ = small(watch, make=lambda p: torch.optim.SGD(p, lr=0.0))
    with torch.no_grad():
        model[0].weight.zero_()
    model[1].register_buffer("halves", torch.full((64,), 1e-7, dtype=torch.float16))
    assert watched.pytorch.facts().denormal_fraction == 0


def test_tensors_in_any_layout_and_of_every_size_are_looked_at(watch):
    watched, model, _ = small(watch, make=lambda p: torch.optim.SGD(p, lr=0.0))
    model[1].register_buffer("empty", torch.zeros(0))
    model[1].register_buffer("single", torch.tensor(TINY))
    model[1].register_buffer("images", torch.full((2, 3, 4, 4), TINY).to(memory_format=torch.channels_last))
    model[1].register_buffer("wide", torch.full((1000, 20), TINY).T)
    model[1].register_buffer("sparse", torch.eye(3).to_sparse())
    assert watched.pytorch.facts().denormal_fraction > 0.9


def test_it_does_not_apply_on_a_gpu_or_an_unknown_processor():
    facts = replace(FACTS, denormal_fraction=0.1)
    lever = Denormals()
    assert lever.applies(facts, MACHINE) is None
    assert "GPU" in lever.applies(replace(facts, device="cuda"), MACHINE)
    assert "s390x" in lever.applies(facts, replace(MACHINE, architecture="s390x"))


# -- what it does --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 3])
def test_every_thread_of_an_operation_flushes_while_engaged_and_none_after(num, watch):
    torch.set_num_threads(num)
    watched, _, train = small(watch)
    assert _flushed_share(num) == 0
    watched.pytorch.engage(LEVER)
    train(2)
    assert _flushed_share(num) == 1
    words = "1 thread" if num == 1 else f"{num} threads"
    assert watched.pytorch.evidence() == ({"denormals": f"denormal products are zero on {words}"}, {})
    watched.pytorch.engage({})
    assert _flushed_share(num) == 0


def test_backward_computes_so_too(watch):
    seen = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(_flushed_share(2))
            return gradient

    torch.set_num_threads(2)
    watched, _, _ = small(watch)
    watched.pytorch.engage(LEVER)
    Looking.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [1]


def test_engaging_and_releasing_a_hundred_times_leaves_every_thread_as_it_was(watch):
    torch.set_num_threads(2)
    watched, _, train = small(watch)
    for _ in range(100):
        watched.pytorch.engage(LEVER)
        watched.pytorch.engage({})
    train(1)
    assert _flushed_share(2) == 0 and watched.pytorch.session.kept == {}


def test_threads_of_another_number_are_reached_and_released_as_well(watch):
    torch.set_num_threads(3)
    watched, _, _ = small(watch)
    watched.pytorch.engage(LEVER)
    watched.pytorch.engage({**LEVER, "threads": {"num": 1}})
    watched.pytorch.engage({"threads": {"num": 1}})
    watched.pytorch.engage({})
    assert torch.get_num_threads() == 3 and _flushed_share(3) == 0
    watched.pytorch.engage({**LEVER, "threads": {"num": 2}})
    assert _flushed_share(2) == 1
    watched.pytorch.engage({})
    assert _flushed_share(3) == 0


def test_a_thread_of_the_scripts_own_computes_as_before(watch):
    begin, begun, shares = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        begin.wait()
        shares.append(_flushed_share(1))

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    watched, _, _ = small(watch)
    watched.pytorch.engage(LEVER)
    begin.set()
    thread.join()
    assert shares == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_computes_with_denormals(watch):
    watched, _, _ = small(watch)
    watched.pytorch.engage(LEVER)
    if os.fork() == 0:
        os._exit(int(1e-300 * 1e-10 == 0))
    assert os.wait()[1] == 0
    assert 1e-300 * 1e-10 == 0, "and this process does not"


def test_a_script_that_flushes_itself_is_left_alone(watch):
    torch.set_flush_denormal(True)
    watched, _, _ = small(watch)
    watched.pytorch.engage(LEVER)
    assert watched.pytorch.evidence() == ({}, {"denormals": "the script flushes denormal numbers itself"})
    watched.pytorch.engage({})
    assert _flushed_share(1) == 1


def test_a_processor_that_refuses_is_said_to(watch, monkeypatch):
    watched, _, _ = small(watch)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: False)
    watched.pytorch.engage(LEVER)
    assert watched.pytorch.evidence() == ({}, {"denormals": "this processor cannot flush denormal numbers"})
    assert watched.pytorch.engaged() == {}


def test_threads_that_cannot_be_reached_are_said_to_be_so_and_the_mode_is_taken_back(watch, monkeypatch):
    torch.set_num_threads(2)
    watched, _, _ = small(watch)
    monkeypatch.setattr("ctypes.CDLL", lambda path: object())
    watched.pytorch.engage(LEVER)
    assert "cannot be reached" in watched.pytorch.evidence()[1]["denormals"]
    monkeypatch.undo()
    assert _flushed_share(2) == 0


def test_a_team_is_one_call_in_each_thread():
    seen = []
    _in_each_thread(2, lambda: seen.append(threading.get_ident()))
    assert len(seen) == len({*seen}) == 2 and threading.get_ident() in seen


# -- numbers -------------------------------------------------------------------------------------------------------


def test_gradients_and_updates_are_looked_at():
    assert checks_of(LEVER, {"denormals": Denormals()}) == ("gradients", "updates")


def test_numbers_agree_where_a_part_of_everything_is_denormal(watch):
    def change(model, optimizer):
        """What long training leaves of six rows that nothing reaches, and of a bias."""
        with torch.no_grad():
            for part in (model[0].weight[:6], model[0].weight.grad[:6], model[2].bias.grad):
                part.fill_(TINY)
            for name in ("exp_avg", "exp_avg_sq") if optimizer.state else ():
                optimizer.state[model[0].weight][name][:6] = TINY
                optimizer.state[model[2].bias][name].fill_(TINY)

    watched, _, train = small(watch, change)
    for step in (11, 14, 17):
        watched.compare(step, LEVER, "gradients", "updates")
    train(14)
    judged = judge(watched.answers, "precision", ("gradients", "updates"))
    assert len(watched.answers) == 3 and judged.verdict == "agrees", judged.detail
