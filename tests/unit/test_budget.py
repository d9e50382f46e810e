"""How much time there is, what is refused because it cannot fit, and what compiling is expected to take."""

import time
from dataclasses import replace

import pytest

from flatout.errors import Inconclusive
from flatout.frameworks.pytorch.levers import registry
from flatout.records.plan import Candidate, Trial
from flatout.trials.budget import STARTING_S, WHY_DEFAULTS_S, Budget, compiling_s
from handmade import FACTS


def test_slow_steps_get_more_time_where_nothing_was_asked_for():
    totals = {}
    for step_s in (0.01, 0.3, 2.0):
        budget = Budget(None)
        budget.suit(46, step_s)
        totals[step_s] = budget.total_s
    assert totals == {0.01: 75.0, 0.3: 180.0, 2.0: 300.0}
    asked = Budget(60.0)
    asked.suit(46, 2.0)
    assert asked.total_s == 60.0


def test_very_slow_steps_get_what_the_least_of_it_takes_up_to_a_limit():
    for step_s, total_s in ((1.0, 60.0), (10.0, 140.0), (100.0, 600.0)):
        budget = Budget(None, WHY_DEFAULTS_S)
        budget.suit(14, step_s)
        assert budget.total_s == total_s


def test_deadlines_leave_time_to_write_the_report():
    budget = Budget(100.0)
    now_s = time.perf_counter()
    assert budget.deadline_s() - now_s == pytest.approx(90, abs=1)
    assert budget.deadline_s(0.5) - now_s == pytest.approx(45, abs=1)
    assert budget.left_s == pytest.approx(90, abs=1) and budget.share_spent == pytest.approx(0, abs=0.01)


def test_steps_that_are_far_too_slow_for_the_budget_are_refused_with_one_that_suffices():
    budget = Budget(60.0)
    budget.require(38, 1.5, "train.py")
    with pytest.raises(Inconclusive) as caught:
        budget.require(38, 35.0, "train.py")
    assert caught.value.error == "a step of `train.py` takes 35 s: too long for a budget of 60 s"
    assert "38 steps" in caught.value.cause and caught.value.hint.startswith("`--budget 23m`")


def test_slow_steps_are_not_blamed_on_the_script_where_others_use_the_machine():
    with pytest.raises(Inconclusive) as caught:
        Budget(60.0).require(38, 35.0, "train.py", taken=lambda: 0.7)
    assert caught.value.error == "the machine is too busy for a budget of 60 s"
    assert caught.value.cause.startswith("others use 70 % of the CPU, and a step of `train.py` takes 35 s meanwhile")
    assert caught.value.hint == "wait until the machine is quiet, or `--budget 23m`"
    with pytest.raises(Inconclusive, match="a step of"):
        Budget(60.0).require(38, 35.0, "train.py", taken=lambda: 0.01)


def test_what_promises_much_gets_more_time_where_nothing_was_asked_for():
    usual, asked = Budget(None), Budget(30.0)
    for budget in (usual, asked):
        budget.allow(180.0)
        budget.allow(60.0)
    assert (usual.total_s, asked.total_s) == (180.0, 30.0)


# -- compiling -------------------------------------------------------------------------------------------------------

LEVERS = registry()


def facts(num_modules, num_repeated_blocks=0):
    model = replace(FACTS.models[0], num_modules=num_modules, num_repeated_blocks=num_repeated_blocks)
    return replace(FACTS, models=(model,))


def expected_s(settings, found, trials=()):
    return compiling_s(Candidate(levers=settings), LEVERS, found, trials)


def test_what_does_not_compile_takes_nothing():
    assert expected_s({"threads": {"num": 1}}, facts(55)) == 0


@pytest.mark.parametrize(("num_modules", "seen_s"), [(6, 22), (55, 46), (55, 59)])
def test_the_guess_lies_beside_what_was_measured(num_modules, seen_s):
    assert seen_s / 1.5 < expected_s({"compile": {}}, facts(num_modules)) < 1.5 * seen_s


def test_of_blocks_that_repeat_one_is_compiled():
    whole, regional = (expected_s({"compile": words}, facts(56, 4)) for words in ({}, {"mode": "regional"}))
    assert regional - STARTING_S == pytest.approx((whole - STARTING_S) / 4)


def test_what_was_seen_here_counts_where_it_was_longer():
    trial = Trial(levers={"compile": {}}, outcome="slower", reason="", engage_s=90.0)
    other = replace(trial, levers={"threads": {"num": 1}}, engage_s=200.0)
    assert expected_s({"compile": {}}, facts(6), [trial, other]) == 90.0


def test_on_a_device_a_large_model_is_compiled_within_a_default_budget():
    on_gpu = replace(facts(150), device="cuda")
    assert 20 < expected_s({"compile": {}}, on_gpu) < 40 < expected_s({"compile": {}}, facts(150))
