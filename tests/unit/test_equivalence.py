"""Is a metric the same, as far as so many seeds can tell?"""

import math
import random

import pytest

from flatout.judge import equivalence
from flatout.judge.equivalence import compare


def seeds(mean, num, *, seed=1, spread=0.01):
    chance = random.Random(seed)
    return [mean + chance.gauss(0, spread) for _ in range(num)]


def test_values_that_are_equal_to_the_last_digit_are_identical():
    values = seeds(0.98, 5)
    assert compare(values, values).verdict == "identical"


def test_a_difference_well_within_the_margin_is_shown_to_be_so():
    plain = seeds(0.98, 8)
    found = compare(plain, [x + 0.001 * (-1) ** i for i, x in enumerate(plain)], margin=0.005)
    assert found.verdict == "equivalent" and -0.005 < found.low < 0 < found.high < 0.005


def test_without_a_margin_the_plain_seeds_spread_is_it():
    plain = seeds(0.98, 8)
    found = compare(plain, [x + 0.001 * (-1) ** i for i, x in enumerate(plain)])
    assert found.margin == found.plain_spread > 0.003 and found.margin_source.startswith("the standard deviation")


def test_a_difference_beyond_the_margin_is_different_to_either_side():
    plain = seeds(0.98, 5, spread=0.001)
    for shift in (-0.05, 0.05):
        found = compare(plain, [x + shift + 0.001 * (i % 2) for i, x in enumerate(plain)], margin=0.01)
        assert found.verdict == "different" and found.difference == pytest.approx(shift, abs=0.001)


def test_no_difference_found_is_not_no_difference_and_says_how_many_seeds_would_do():
    plain, changed = seeds(0.98, 5, seed=1), seeds(0.98, 5, seed=2)
    found = compare(plain, changed)
    assert found.verdict == "undecided" and "beyond the margin" in found.reason
    assert found.more_seeds is not None and 1 <= found.more_seeds < 60
    more = compare(seeds(0.98, 60, seed=1), seeds(0.98, 60, seed=2))
    assert more.verdict == "equivalent"


def test_a_difference_of_just_the_margin_is_decided_by_no_number_of_seeds():
    plain = [0.98, 0.97, 0.99, 0.98]
    found = compare(plain, [0.992, 0.978, 1.002, 0.988], margin=0.01)
    assert found.verdict == "undecided" and found.more_seeds is None


@pytest.mark.parametrize("num", [0, 1, 2])
def test_fewer_than_three_seeds_decide_nothing(num):
    found = compare([0.5] * num, [0.5] * num)
    assert found.verdict == "undecided" and f"{num} of at least 3" in found.reason
    assert found.more_seeds == 3 - num


def test_a_run_that_diverged_on_one_side_only_is_different():
    assert compare([0.9, 0.9, 0.9], [0.9, math.nan, 0.9]).verdict == "different"
    assert compare([0.9, math.inf, 0.9], [0.9, 0.9, 0.9]).verdict == "different"
    both = compare([0.9, math.nan, 0.9], [0.9, math.nan, 0.9])
    assert both.verdict == "undecided" and both.reason == "with 1 of 3 seeds both sides came to NaN or infinity"
    assert both.num_diverged == 1 and both.more_seeds is None
    every = compare([math.nan, math.inf, math.nan], [math.nan, -math.inf, math.inf])
    assert (every.verdict, every.num_diverged, every.num_seeds) == ("undecided", 3, 0) and "every seed" in every.reason
    assert compare([1e200, 1e200, 0.5], [1e200, 1e200, math.nan]).verdict == "different", "and no crash"


def test_seeds_that_all_come_out_alike_give_no_margin():
    found = compare([0.9] * 4, [0.9, 0.91, 0.9, 0.9])
    assert found.verdict == "undecided" and "no spread" in found.reason
    assert compare([0.9] * 4, [0.9, 0.91, 0.9, 0.9], margin=0.05).verdict == "equivalent"


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan, math.inf])
def test_a_margin_is_a_positive_number(margin):
    with pytest.raises(ValueError, match="no margin"):
        compare([1.0] * 3, [1.0] * 3, margin)


def test_values_of_other_seeds_are_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="3 plain values but 2"):
        compare([1.0] * 3, [1.0] * 2)


def test_a_difference_as_large_as_the_margin_is_called_equivalent_in_at_most_five_of_a_hundred():
    chance = random.Random(4)
    called = 0
    for _ in range(2000):
        plain = [chance.gauss(0, 1) for _ in range(8)]
        changed = [x + 0.5 + chance.gauss(0, 0.3) for x in plain]
        called += compare(plain, changed, margin=0.5).verdict == "equivalent"
    assert called / 2000 <= 0.065  # 5 % and three standard deviations of chance


def test_seeds_that_would_decide_are_never_more_than_anybody_would_run():
    assert equivalence.MOST_SEEDS <= 1000


def test_values_whose_squares_no_float_holds_are_undecided_and_no_crash():
    for values in ([1e200, 2e200, 3e200], [1.7e308, -1.7e308, 1e308]):
        found = compare(values, values[::-1], margin=1.0)
        assert found.verdict == "undecided" and found.num_diverged == 3


def test_one_seed_that_is_far_off_does_not_make_the_margin():
    found = compare([0.98, 0.981, 0.979, 0.10, 0.982], [0.93, 0.931, 0.929, 0.10, 0.932])
    assert found.verdict != "equivalent" and "but one, which is far off" in found.margin_source
