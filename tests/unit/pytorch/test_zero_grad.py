"""Does the lever `zero_grad` set to None where the script says zero, only there, and only where it is asked for?"""

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.levers.zero_grad import ZeroGrad  # noqa: E402
from flatout.judge.agreement import judge  # noqa: E402
from flatout.records.plan import allows  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = {"zero_grad": {}}
ZEROING = {
    "the optimizer's": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by position": lambda model, optimizer: optimizer.zero_grad(False),
    "the model's": lambda model, optimizer: model.zero_grad(set_to_none=False),
}
DEFAULT = {
    "the optimizer's": lambda model, optimizer: optimizer.zero_grad(),
    "by name": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "the model's": lambda model, optimizer: model.zero_grad(),
}


class Halves(nn.Module):
    """A model of which a step may reach one half alone."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reach_right = True

    def forward(self, x):
        x = self.left(x)
        return self.right(x) if self.reach_right else x


class Training:
    def __init__(self, clear, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)):
        torch.manual_seed(3)
        self.model, self.clear, self.seen = Halves(), clear, []
        self.optimizer = make(self.model.parameters())

    def step(self, num=1):
        for _ in range(num):
            self.clear(self.model, self.optimizer)
            self.seen.append(self.model.left.weight.grad is None)
            self.model(torch.randn(3, 4)).pow(2).mean().backward()
            self.optimizer.step()
        return self

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


@pytest.mark.parametrize("clear", ZEROING.values(), ids=ZEROING)
def test_a_script_that_sets_to_zero_sets_to_none_under_the_lever_and_to_zero_again_after_it(clear, watch):
    watched, script = watch(), Training(clear)
    script.step(8)
    assert watched.pytorch.facts().zeroes_gradients
    watched.pytorch.engage(LEVER)
    script.seen.clear()
    script.step(3)
    assert script.seen == [True] * 3
    assert watched.pytorch.evidence() == ({"zero_grad": "3 calls set gradients to None instead of zero"}, {})
    watched.pytorch.engage({})
    script.seen.clear()
    script.step(3)
    assert script.seen == [False] * 3


@pytest.mark.parametrize("clear", DEFAULT.values(), ids=DEFAULT)
def test_a_script_that_sets_to_none_itself_is_not_for_the_lever(clear, watch):
    watched, script = watch(), Training(clear)
    script.step(8)
    assert not watched.pytorch.facts().zeroes_gradients
    watched.pytorch.engage(LEVER)
    script.step(3)
    assert watched.pytorch.evidence() == ({}, {"zero_grad": "no effect was seen"})


def test_it_applies_only_where_semantics_are_accepted_and_the_script_asks_for_zeros():
    lever = ZeroGrad()
    assert not allows("statistical", lever.class_) and allows("semantics", lever.class_)
    assert "does not call" in lever.applies(FACTS, MACHINE)
    assert lever.applies(replace(FACTS, zeroes_gradients=True), MACHINE) is None


def test_where_every_parameter_has_a_gradient_the_run_is_the_same(watch, workload, different):
    plain = workload("transformer").train(18)
    watched, script = watch(), workload("transformer")
    watched.engage(5, LEVER)
    watched.engage(14, {})
    script.train(18)
    watched.pytorch.detach()
    assert different(plain.state(), script.state()) == []


def test_a_half_that_is_not_reached_moves_on_in_plain_and_stays_under_the_lever(watch):
    """Why it is of class semantics: momentum and weight decay act on a gradient of zero, and not on None."""

    def moved(levers):
        watched, script = watch(), Training(ZEROING["the optimizer's"])
        script.step(8)
        watched.pytorch.engage(levers)
        script.step(2)
        script.model.reach_right = False
        before = script.parameters()
        script.step(2)
        watched.pytorch.detach()
        return not torch.equal(before["right.weight"], script.model.right.weight)

    assert moved({}) and not moved(LEVER)


def test_after_the_release_a_half_that_is_not_reached_moves_again_and_one_that_never_was_has_no_gradient(watch):
    watched, script = watch(), Training(ZEROING["the optimizer's"])
    script.step(8)
    watched.pytorch.engage(LEVER)
    script.model.reach_right = False
    script.step(2)
    assert script.model.right.weight.grad is None
    watched.pytorch.engage({})
    assert torch.equal(script.model.right.weight.grad, torch.zeros(4, 4))
    assert script.model.never.weight.grad is None
    before = script.parameters()
    script.step(1)
    assert not torch.equal(before["right.weight"], script.model.right.weight)


def test_the_comparison_calls_the_scripts_own_clearing_and_leaves_no_gradient_behind(watch):
    watched, script = watch(), Training(ZEROING["the optimizer's"])
    for step in (10, 13):
        watched.compare(step, LEVER, "gradients", "updates")
    script.step(18)
    judged = judge(watched.answers, "semantics", ("gradients",))
    assert judged.verdict == "agrees", judged.detail
    assert script.model.never.weight.grad is None
    assert watched.pytorch.engaged() == {}


def test_engaging_and_releasing_a_hundred_times_leaves_the_classes_as_they_were(watch):
    before = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    watched, script = watch(), Training(ZEROING["the model's"])
    assert torch.optim.Optimizer.zero_grad is not before[0], "it is looked at what the script calls"
    script.step(8)
    for _ in range(100):
        watched.pytorch.engage(LEVER)
        script.step(1)
        watched.pytorch.engage({})
        assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == before


def test_an_optimizer_of_the_scripts_own_that_clears_in_its_own_way_is_left_alone(watch):
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=False):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.zero_()

    watched, script = watch(), Training(lambda m, o: o.zero_grad(), lambda p: Own(p, lr=0.1))
    script.step(8)
    assert not watched.pytorch.facts().zeroes_gradients
    watched.pytorch.engage(LEVER)
    script.step(2)
    assert watched.pytorch.evidence()[1] == {"zero_grad": "no effect was seen"} and not any(script.seen[-2:])


def test_what_the_script_asks_wrongly_raises_as_without_us(watch):
    watched, script = watch(), Training(ZEROING["the optimizer's"])
    script.step(8)
    watched.pytorch.engage(LEVER)
    with pytest.raises(TypeError, match="unexpected keyword"):
        script.optimizer.zero_grad(set_to_nothing=False)
    with pytest.raises(TypeError, match="takes from 1 to 2 positional"):
        script.optimizer.zero_grad(False, 3)
    script.step(2)


def test_a_model_and_an_optimizer_may_be_copied_under_the_lever(watch):
    watched, script = watch(), Training(ZEROING["the model's"])
    script.step(8)
    watched.pytorch.engage(LEVER)
    script.step(2)
    twin = copy.deepcopy(script.model)
    twin.zero_grad(set_to_none=False)
    assert twin.left.weight.grad is None and script.model.left.weight.grad is not None
