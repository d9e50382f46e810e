"""The only place that says "faster"."""

import math
import random

import pytest

from flatout.judge import stats
from flatout.judge.sequential import Looks
from flatout.judge.stats import compare, quantile, summarize


def noisy(mean_s, num, *, seed=1, spread=0.01):
    chance = random.Random(seed)
    return [mean_s * math.exp(chance.gauss(0, spread)) for _ in range(num)]


def test_a_candidate_that_takes_half_the_time_is_twice_as_fast():
    found = compare(noisy(2.0, 8, seed=1), noisy(1.0, 8, seed=2))
    assert found.verdict == "faster" and found.reason == ""
    assert found.ratio == pytest.approx(2.0, rel=0.02)
    assert found.low99 < found.low < found.ratio < found.high < found.high99
    assert found.num_pairs == 8


def test_a_candidate_that_takes_longer_is_slower():
    assert compare(noisy(1.0, 8, seed=1), noisy(1.3, 8, seed=2)).verdict == "slower"


def test_drift_within_which_pairs_agree_does_not_hide_a_gain():
    drift = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0]
    candidate = [x / 1.1 * (1 + 0.002 * (-1) ** i) for i, x in enumerate(drift)]
    assert compare(drift, candidate).verdict == "faster"


def test_faster_needs_the_lower_end_of_the_99_percent_interval_above_1():
    """Four pairs with mean m and deviation s: the half width is t s / 2 with t = 5.841 at 99 %, 3.182 at 95 %."""
    deviation = 0.01
    shape = [-1.5, -0.5, 0.5, 1.5]
    unit = math.sqrt(sum(x * x for x in shape) / 3)

    def verdict(mean):
        logs = [mean + deviation * x / unit for x in shape]
        return compare([math.exp(x) for x in logs], [1.0] * 4)

    assert verdict(0.0293).verdict == "faster"  # 5.8409 / 2 x 0.01 = 0.0292
    found = verdict(0.0291)
    assert found.verdict == "inconclusive"
    assert found.low99 < 1 < found.low
    assert found.reason == "not sure enough: 1 lies in the 99 % interval"
    assert verdict(-0.0293).verdict == "slower"
    assert verdict(-0.0291).verdict == "inconclusive"


def test_no_difference_needs_the_95_percent_interval_within_2_percent():
    inside = [1.0 + x for x in (0.004, -0.004, 0.008, -0.008, 0.002, -0.002)]
    assert compare(inside, [1.0] * 6).verdict == "no difference"
    outside = [1.0 + 4 * x for x in (0.004, -0.004, 0.008, -0.008, 0.002, -0.002)]
    assert compare(outside, [1.0] * 6).verdict == "inconclusive"


def test_a_small_gain_that_is_surely_there_is_faster():
    found = compare(noisy(1.01, 40, seed=3, spread=0.002), noisy(1.0, 40, seed=4, spread=0.002))
    assert found.verdict == "faster" and found.high < 1.02


def test_plain_against_itself_is_no_difference():
    samples = noisy(1.0, 6)
    found = compare(samples, samples)
    assert found.verdict == "no difference"
    assert found.ratio == found.low == found.high == found.low99 == found.high99 == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_window_without_a_finite_time_decides_nothing(bad):
    found = compare([1.0, 1.1, bad, 1.0], [0.5, 0.5, 0.5, 0.6])
    assert found.verdict == "inconclusive" and "finite" in found.reason and math.isnan(found.ratio)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_zero_and_negative_times_are_a_broken_clock_and_not_infinitely_fast(bad):
    found = compare([1.0, 1.1, 1.2, 1.0], [0.5, bad, 0.5, 0.6])
    assert found.verdict == "inconclusive" and "clock" in found.reason and math.isnan(found.ratio)


@pytest.mark.parametrize("num", range(4, 12))
def test_constant_samples_that_differ_are_no_measurement_whatever_their_number(num):
    for base, other in ((0.3, 0.1), (1.0, 2.0), (0.7, 0.3)):
        found = compare([base] * num, [other] * num)
        assert found.verdict == "inconclusive" and "identical" in found.reason


@pytest.mark.parametrize("num", range(4, 12))
def test_windows_that_never_vary_are_no_measurement_even_where_both_sides_are_equal(num):
    for base, other in ((0.3, 0.3), (0.1 + 0.2, 0.3)):
        found = compare([base] * num, [other] * num)
        assert found.verdict == "inconclusive" and "clock is too coarse" in found.reason
    varying = [0.3 + 0.01 * (i % 3) for i in range(num)]
    assert compare(varying, varying).verdict == "no difference"


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_too_few_pairs_are_inconclusive_and_say_so(num):
    found = compare([2.0] * num, [1.0] * num)
    assert found.verdict == "inconclusive" and found.reason.startswith(f"{num} of at least 4")
    assert found.num_pairs == num


def test_windows_that_are_not_paired_are_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="5 baseline windows but 4 candidate windows"):
        compare([1.0] * 5, [1.0] * 4)


def test_times_that_no_float_can_hold_the_ratio_of_give_an_interval_and_no_crash():
    found = compare([1e300, 1e-300, 1e300, 1e-300], [1e-300, 1e300, 1e-300, 1e300])
    assert found.verdict == "inconclusive" and found.high == math.inf and found.low == 0.0


def test_white_noise_is_called_faster_or_slower_at_most_once_in_a_hundred():
    chance = random.Random(20261121)
    for num, limit in ((4, 0.016), (10, 0.016)):
        wrong = 0
        for _ in range(2000):
            logs = [chance.gauss(0, 0.03) for _ in range(2 * num)]
            found = compare([math.exp(x) for x in logs[:num]], [math.exp(x) for x in logs[num:]])
            wrong += found.verdict in ("faster", "slower")
        # 1 % of 2000 is 20; three standard deviations of chance above it are 33
        assert wrong / 2000 <= limit


def test_the_95_percent_interval_holds_the_truth_in_95_of_100_cases():
    chance = random.Random(5)
    held = 0
    for _ in range(1000):
        base = [math.exp(chance.gauss(0, 0.05)) for _ in range(6)]
        candidate = [math.exp(chance.gauss(0, 0.05)) / 1.25 for _ in range(6)]
        found = compare(base, candidate)
        held += found.low <= 1.25 <= found.high
    assert 0.93 <= held / 1000 <= 0.97


def test_a_summary_says_where_the_middle_is_and_how_far_samples_spread():
    found = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.num, found.mean, found.median) == (5, 3.0, 3.0)
    assert found.low == pytest.approx(1.2) and found.high == pytest.approx(4.8)
    assert found.spread_fraction == pytest.approx(1 / 3)


def test_one_sample_is_its_own_summary_without_spread():
    found = summarize([2.0])
    assert (found.mean, found.median, found.low, found.high, found.spread_fraction) == (2.0, 2.0, 2.0, 2.0, 0.0)


def test_samples_around_zero_have_no_relative_spread():
    assert summarize([-1.0, 0.0, 1.0]).spread_fraction == 0.0


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_nothing_and_what_is_no_number_cannot_be_summarised(samples):
    with pytest.raises(ValueError, match="summarise"):
        summarize(samples)


def test_quantiles_are_those_of_numpy():
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert quantile([7.0], 0.3) == 7.0


def test_the_limits_are_those_of_the_design():
    assert stats.NEGLIGIBLE == 0.02 and stats.MIN_PAIRS >= 4


def test_one_pair_that_a_burst_fell_into_does_not_hide_a_gain():
    """Measured: ResNet-18 in channels_last on a shared machine."""
    pairs = [1.19, 1.17, 1.07, 1.23, 1.21, 2.49, 1.12, 1.11]
    found = compare(pairs, [1.0] * len(pairs))
    assert found.verdict == "faster" and found.ratio == pytest.approx(1.17, abs=0.01) and found.low99 == 1.07


def test_eight_pairs_are_faster_when_all_are():
    assert compare([1.001, 1.3, 1.02, 1.9, 1.1, 1.05, 1.2, 1.4], [1.0] * 8).verdict == "faster"
    assert compare([0.999, 1.3, 1.02, 1.9, 1.1, 1.05, 1.2, 1.4], [1.0] * 8).verdict == "inconclusive"


def test_false_alarms_stay_below_one_in_a_hundred_however_heavy_the_tails():
    chance = random.Random(7)

    def burst():
        return math.exp(chance.gauss(0, 0.05) * (10 if chance.random() < 0.15 else 1))

    alarms = [
        compare([burst() for _ in range(num)], [burst() for _ in range(num)]).verdict in ("faster", "slower")
        for num in (8, 12, 16)
        for _ in range(600)
    ]
    assert sum(alarms) <= 0.018 * len(alarms)  # 1 % and three standard deviations of 1,800 tries


def test_a_look_that_may_spend_less_has_wider_intervals():
    base, candidate = noisy(1.03, 16, seed=1), noisy(1.0, 16, seed=2)
    whole, half = compare(base, candidate), compare(base, candidate, share=0.5)
    assert half.ratio == whole.ratio and half.low <= whole.low and half.high >= whole.high
    assert half.low99 < whole.low99 or half.high99 > whole.high99


def test_where_ranks_have_no_such_level_the_interval_is_everything_and_decides_nothing():
    base = [1.5 + 0.01 * i for i in range(8)]
    found = compare(base, [1.0] * 8, share=0.5)
    assert (found.low99, found.high99, found.verdict) == (0.0, math.inf, "inconclusive") and found.low > 1
    assert compare(base, [1.0] * 8).verdict == "faster"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_no_look_spends_nothing_or_more_than_all(share):
    with pytest.raises(ValueError, match="no share"):
        compare([1.0] * 4, [1.0] * 4, share=share)


def test_looks_rise_and_spend_all_of_the_error_and_no_more():
    assert Looks.alike(28, 16) == Looks.alike(16), "a look after the last is none"
    looks = Looks.alike(4, 9, 16)
    assert sum(looks.share(num) for num in range(20)) == pytest.approx(1.0)
    assert [looks.left(num) for num in (2, 4, 5)] == pytest.approx([1.0, 1.0, 2 / 3])


def test_looking_twice_is_wrong_no_more_often_than_looking_once():
    chance = random.Random(11)
    looks, wrong, missed = Looks.alike(16, 28), 0, 0
    for _ in range(1500):
        base, other = ([math.exp(chance.gauss(0, 0.03)) for _ in range(28)] for _ in range(2))
        found = compare(base[:16], other[:16], share=looks.share(16))
        if found.verdict == "inconclusive":
            found = compare(base, other, share=looks.share(28))
        wrong += found.verdict in ("faster", "slower")
        missed += not found.low <= 1.0 <= found.high
    assert wrong <= 0.018 * 1500 and missed <= 0.065 * 1500  # 1 % and 5 %, and three standard deviations of chance


def test_how_much_equal_sides_scatter_is_not_moved_by_a_burst():
    chance = random.Random(3)
    first, second = ([math.exp(chance.gauss(0, 0.02)) for _ in range(200)] for _ in range(2))
    second[7] *= 5
    assert stats.scatter(first, second) == pytest.approx(0.02 * math.sqrt(2), rel=0.15)
    assert stats.scatter([1.0, math.nan, 1.0, 1.0], [1.0] * 4) == stats.scatter([1.0], [1.0]) == 0.0


def test_any_number_of_pairs_is_compared():
    chance = random.Random(3)
    logs = [chance.gauss(0.01, 0.05) for _ in range(100_001)]
    found = compare([math.exp(x) for x in logs], [1.0] * len(logs))
    assert found.verdict == "faster" and found.num_pairs == len(logs)
    assert found.low99 < math.exp(0.01) < found.high99 and found.high / found.low < 1.002


def test_intervals_of_many_pairs_miss_as_rarely_as_those_of_few():
    chance = random.Random(4)
    missed = 0
    for _ in range(200):
        found = compare([math.exp(chance.gauss(0, 0.05)) for _ in range(400)], [1.0] * 400)
        missed += not found.low <= 1 <= found.high
    assert missed <= 20
