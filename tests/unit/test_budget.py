"""How much time there is, and what is refused because it cannot fit."""

import time

import pytest

from flatout.errors import Inconclusive
from flatout.trials.budget import WHY_DEFAULTS_S, Budget


def test_slow_steps_get_more_time_where_nothing_was_asked_for():
    totals = {}
    for step_s in (0.01, 0.3, 2.0):
        budget = Budget(None)
        budget.suit(46, step_s)
        totals[step_s] = budget.total_s
    assert totals == {0.01: 120.0, 0.3: 180.0, 2.0: 300.0}
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


def test_what_promises_much_gets_more_time_where_nothing_was_asked_for():
    usual, asked = Budget(None), Budget(30.0)
    for budget in (usual, asked):
        budget.allow(180.0)
        budget.allow(60.0)
    assert (usual.total_s, asked.total_s) == (180.0, 30.0)
