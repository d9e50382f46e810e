"""Are pairs measured until enough is known, and no longer? With a bench that answers from a list."""

import itertools
import random
import time

import pytest

from flatout.judge.paired import Extent, Pair
from flatout.judge.sequential import Looks
from flatout.run.script import Script
from flatout.trials import bench, windows
from flatout.trials.budget import Size, size_for
from flatout.trials.terms import Terms
from handmade import window


class Bench:
    """A script whose plain step takes 10 ms and whose candidate takes what it is told, window by window."""

    def __init__(self, *candidate_s, foreign=()):
        self.size = Size(num_steps=2, skip_steps=1, loader_skip_steps=3)
        self.levers = {}
        self.last_evidence, self.last_missing = {"x": "seen"}, {}
        self.orders = []
        self.lots, self.noise = random.Random(1), 0.0
        self._candidate_s = itertools.cycle(candidate_s)
        self._foreign = itertools.chain(foreign, itertools.repeat(0.0))

    def resize_after(self, window):
        return False

    def window(self, levers, *, purpose, observe="ends", skip=None, num_steps=None):
        self.orders.append(bool(levers))
        step_s = next(self._candidate_s) if levers else 0.010
        return window((step_s, step_s), observe="ends", foreign_fraction=next(self._foreign))


def measure(bench, *looks, enough="known", **changes):
    extent = {"deadline_s": time.perf_counter() + 60, **changes}
    wanted = Extent(looks=Looks.alike(*(looks or (4, 9))), enough=enough, **extent)
    return windows.measure(bench, {"x": {}}, wanted, purpose="trial")


def test_the_lot_says_which_side_goes_first_and_each_window_has_its_other_side_beside_it():
    bench = Bench(0.009, 0.0105)
    found = measure(bench, 40, enough="all")
    drawn = random.Random(1)
    assert found.candidate_first == [(drawn.random() < 0.5, drawn.random())[0] for _ in range(40)]
    assert bench.orders == [side for first in found.candidate_first for side in (first, not first)]
    assert 10 < sum(found.candidate_first) < 30 and set(found.baseline_s) == {0.010}


def test_a_rhythm_of_the_machine_that_fits_the_windows_is_no_gain():
    """Fast, slow, slow, fast: with sides that take turns in going first the slow windows would all be one side's."""

    class Rhythm(Bench):
        def window(self, levers, *, purpose, observe="ends", skip=None, num_steps=None):
            slow = len(self.orders) % 4 in (1, 2)
            self.orders.append(bool(levers))
            return window((0.011,) if slow else (0.010,), observe="ends", foreign_fraction=0.0)

    for seed in range(20):
        bench = Rhythm()
        bench.lots = random.Random(seed)
        found = measure(bench, 16, 28, enough="clear")
        assert found.compare().verdict in ("no difference", "inconclusive")


def test_each_look_spends_its_share_and_the_last_one_what_is_left():
    assert measure(Bench(0.00900, 0.00902)).share == 0.5
    assert measure(Bench(0.008, 0.011)).share == 0.5
    assert measure(Bench(0.008, 0.011), 8, enough="all").share == 1.0


def test_a_measurement_that_is_cut_short_is_judged_with_what_no_look_has_spent():
    before, after = time.perf_counter() - 1, time.perf_counter() + 60
    cut = measure(Bench(0.008, 0.0125), 4, 16, enough="clear", deadline_s=before, min_pairs=6)
    assert (len(cut.baseline_s), cut.share, cut.looked_at) == (6, 0.5, 4)
    whole = measure(Bench(0.008, 0.0125), 16, enough="clear", deadline_s=after)
    assert whole.share == 1.0


def test_few_pairs_that_scatter_less_than_plain_against_plain_are_not_believed():
    quiet, noisy = Bench(0.00900, 0.00902), Bench(0.00900, 0.00902)
    noisy.noise = 0.08
    assert measure(quiet, 4).compare().verdict == "faster"
    assert measure(noisy, 4).compare().verdict == "inconclusive"
    assert measure(noisy, 16, enough="all").compare().verdict == "faster", "16 pairs know their own noise"


def test_a_hopeless_candidate_costs_two_pairs():
    found = measure(Bench(0.012))
    assert len(found.baseline_s) == 2 and "not pursued" in found.given_up


def test_one_that_is_surely_slower_costs_four():
    assert len(measure(Bench(0.0102, 0.0104)).baseline_s) == 4


def test_one_that_is_known_closely_costs_four_and_a_noisy_one_all():
    assert len(measure(Bench(0.00900, 0.00902)).baseline_s) == 4
    noisy = measure(Bench(0.008, 0.011))
    assert len(noisy.baseline_s) == 9 and noisy.compare().verdict == "inconclusive"


def test_the_best_is_measured_in_full_and_longer_only_while_it_is_unclear():
    assert len(measure(Bench(0.0090, 0.0092), 16, 28, enough="clear").baseline_s) == 16
    assert len(measure(Bench(0.008, 0.0125), 16, 28, enough="clear").baseline_s) == 28


def test_disturbed_pairs_are_left_out_and_counted():
    found = measure(Bench(0.0090, 0.00901, foreign=[0.5, 0.0, 0.0, 0.3]))
    assert found.num_discarded == found.num_busy == 2 and len(found.baseline_s) == 4


def test_a_machine_that_is_never_quiet_ends_the_trial_without_a_pair():
    found = measure(Bench(0.009, foreign=[0.9] * 200), 4)
    assert found.baseline_s == [] and found.num_busy == 12


def test_when_the_time_is_over_nobody_waits_for_pairs_that_are_all_discarded():
    found = measure(Bench(0.009, foreign=[0.9] * 200), deadline_s=time.perf_counter() - 1, min_pairs=4)
    assert found.num_discarded == 8 and "time was over after 0 pairs" in found.given_up


def test_when_the_time_is_over_what_was_measured_counts():
    found = measure(Bench(0.008, 0.011), deadline_s=time.perf_counter() - 1)
    assert len(found.baseline_s) == 1 and "time was over" in found.given_up


@pytest.mark.parametrize("step_s", [1e-4, 0.001, 0.1, 3.0])
def test_both_sides_keep_the_evidence(step_s):
    assert measure(Bench(step_s)).evidence == {"x": "seen"}


def test_a_window_that_goes_from_one_epoch_to_the_next_is_no_match_for_one_that_does_not():
    def uneven(first, second):
        return Pair(order=[], readings={False: first, True: second}).is_uneven

    once, never = window(new_epochs=1), window(levers={"workers": {"num": 1}})
    assert uneven(once, never) and not uneven(once, once)


def test_a_window_of_a_smaller_batch_is_no_match_for_any():
    last, usual = window((0.5,), smaller_batches=1), window((1.0,))
    assert Pair(order=[], readings={False: usual, True: last}).is_uneven
    assert not last.counts and usual.counts
    assert window((1.0,) * 30, smaller_batches=1).counts, "one of many says little"
    assert window((0.5, 1.0), smaller_batches=1, new_epochs=1).counts, "windows of whole epochs all have one"


def test_steps_that_differ_only_in_how_often_they_call_the_model_are_compared_for_equal_work(tmp_path):
    one = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms())
    one.usual_calls = 20.0
    episodes = [window((0.01 * a, 0.01 * b), num_calls=(a, b)) for a, b in ((10, 20), (40, 40), (5, 30))]
    one._note(episodes)
    one._note([window((0.01,) * 4)])  # each step makes one call
    assert [w.training_step_s for _, w in one.windows] == pytest.approx([0.2] * 4)


def test_a_plain_window_that_came_out_too_short_makes_the_next_ones_longer(tmp_path):
    one = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms())
    one.size = size_for(0.2, None)
    assert one.size.num_steps == 2, "the machine was busy while it warmed up"
    assert one.resize_after(window((0.01, 0.01))) and one.size.num_steps == 25
    assert not one.resize_after(window((0.01,) * 25)), "long enough"
    assert not one.resize_after(window((0.012,) * 10)), "as many as there should be"
    one.longest_run_steps = 40
    assert one.resize_after(window((0.001,) * 25)) is False and one.size.num_steps == 10, "a run has no more"


def test_a_plain_window_that_took_far_too_long_makes_the_next_ones_shorter(tmp_path):
    one = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms())
    one.size, one.step_guess_s = size_for(0.01, None), 0.01
    assert not one.resize_after(window((0.03,) * 25)), "three times as slow is no reason yet"
    assert one.resize_after(window((0.5,) * 25)) and one.size.num_steps == 1


def test_windows_are_as_long_as_what_lies_between_their_steps_lets_them_be(tmp_path):
    one = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms())
    one.size, one.step_guess_s = size_for(0.01, None), 0.01
    seen = window((0.01,) * 9 + (1.01,), outside_s=(0.0,) * 9 + (1.0,))
    one.windows = [("1", seen), ("1", window((0.01,) * 10))]
    assert one.resize_after(window((0.01,) * 24 + (2.01,), outside_s=(0.0,) * 24 + (2.0,)))
    assert one.step_guess_s == pytest.approx(0.06), "an evaluation of a second in twenty steps"
    assert one.size.num_steps == 7, "a quarter of the window is training at the least"
    assert not one.resize_after(window((0.01,) * 7)), "without one it is no shorter than it should be"


def test_looking_for_quiet_goes_on_with_longer_windows():
    class Growing(Bench):
        def __init__(self):
            super().__init__(foreign=[None, 0.0])
            self.num_short = 0

        def resize_after(self, window):
            self.num_short += 1
            return self.num_short == 1

    growing = Growing()
    assert windows.wait_for_quiet(growing, time.perf_counter() + 60, lambda text: None)
    assert len(growing.orders) == 2


def test_both_windows_of_a_pair_are_stretched_alike_and_pairs_differently_but_never_whole_epochs():
    class Sizes(Bench):
        def window(self, levers, *, purpose, observe="ends", skip=None, num_steps=None):
            self.sizes.append(num_steps)
            return super().window(levers, purpose=purpose)

    for size, different in ((size_for(0.004, None), True), (size_for(0.004, 24), False)):
        bench = Sizes(0.008, 0.0125)
        bench.size, bench.sizes = size, []
        measure(bench, 20, enough="all")
        assert bench.sizes[::2] == bench.sizes[1::2]
        assert (len({*bench.sizes}) > 5) is different
        assert all(0.74 * size.num_steps <= num <= 1.26 * size.num_steps for num in bench.sizes)
