"""How many answers may change before a model in fewer bits is another model?"""

import pytest

from flatout.judge.agreement import judge
from flatout.judge.answers import upper_bound
from flatout.records.difference import Answers, Difference
from flatout.records.plan import allows
from handmade import measured


def counted(num, num_changed, *, finite=True):
    answers = Answers(num=num, num_changed=num_changed, num_changed_by_rounding=1, num_inputs=512, num_shared=32)
    return Difference(check="answers", error=num_changed / num, finite=finite, answers=answers)


def said(*differences):
    return judge([measured(*differences)], "lossy", ("answers",))


def test_lossy_levers_are_admitted_by_name_only():
    assert allows("lossy", "lossy") and not allows("statistical", "lossy") and not allows("precision", "lossy")


@pytest.mark.parametrize(("num_changed", "num"), [(0, 300), (1, 480), (3, 512), (40, 1000)])
def test_the_bound_is_the_share_under_which_so_few_are_seen_once_in_twenty(num_changed, num):
    from scipy.stats import binom

    assert binom.cdf(num_changed, num, upper_bound(num_changed, num)) == pytest.approx(0.05)


def test_none_that_changed_still_leaves_three_of_all():
    assert upper_bound(0, 1000) == pytest.approx(3 / 1000, rel=0.01)


def test_few_answers_that_changed_agree_with_the_numbers_in_the_sentence():
    found = said(counted(1000, 3))
    assert found.verdict == "agrees"
    assert found.detail == "3 of 1,000 answers differ (at most 0.77 %), 1 by rounding alone"


def test_more_than_one_in_a_hundred_within_the_bound_disagree():
    found = said(counted(512, 3))
    assert found.verdict == "disagrees"
    assert found.detail == "3 of 512 answers differ (at most 1.5 %), 1 by rounding alone: up to 1 % is believed"


def test_too_few_answers_tell_nothing_even_where_none_changed():
    found = said(counted(299, 0))
    assert found.verdict == "inconclusive" and "512 different inputs: too few to calibrate and to judge" in found.detail


def test_no_number_where_plain_has_one_disagrees_whatever_the_share():
    assert said(counted(1000, 0, finite=False)).verdict == "disagrees"


def test_answers_that_nobody_compared_are_inconclusive():
    found = judge([measured()], "lossy", ("answers",))
    assert found.verdict == "inconclusive" and "answers not compared" in found.detail
