"""Is nothing concluded where measurements of the same step contradict each other, and is it said with both numbers?"""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.judge.anatomy import RECORDING_S, Account
from flatout.judge.causes import WORTHWHILE, Findings
from flatout.judge.diagnosis import BINDINGS, Bound, diagnose
from flatout.judge.result import TimelineStep, summary_of
from flatout.judge.stats import Comparison
from flatout.report import thinned, tried
from flatout.report import verdict as said_of
from flatout.trials.baseline import Baseline
from flatout.trials.budget import Size
from handmade import FACTS, anatomy, result, trial, window
from shown import on_page, on_screen

SPENT = {"forward": 0.008, "loss": 0.002, "backward": 0.011, "optimizer": 0.002}


def scattered(step_s, num, spread=0.01, seed=0):
    lots = random.Random(seed)
    return tuple(step_s * (1 + spread * lots.gauss(0, 1)) for _ in range(num))


def account(plain_s, other_s, *, spread=0.01, num_plain=8, num_other=4, **changes):
    sides = scattered(plain_s, num_plain, spread), scattered(other_s, num_other, spread, seed=1)
    return Account(plain_s=sides[0], other_s=sides[1], **changes)


def diagnosed(accounts, spent=SPENT, **changes):
    fields = dict(anatomy=anatomy(spent), facts=FACTS, num_cores=2, counterfactuals={}, accounts=accounts)
    return diagnose(Findings(**{**fields, **changes}))


CONTRADICTED = diagnosed({"taken apart": account(0.423, 0.023)})


# -- what contradicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [
        account(0.423, 0.023),
        account(0.023, 0.423),
        account(0.423, 0.023, num_plain=4, in_turn=True),
        account(0.030, 0.023, num_plain=8, num_other=8, in_turn=True),
        account(0.023, 0.030, num_plain=8, num_other=8, in_turn=True),
        account(0.423, 0.023, cost_s=math.inf),
    ],
)
def test_steps_that_surely_differ_by_more_than_a_cause_must_be_worth_contradict_each_other(one):
    assert one.contradicts(WORTHWHILE) and one.seems_to_differ(WORTHWHILE)


@pytest.mark.parametrize(
    "one",
    [
        account(0.0231, 0.0230),
        account(0.0250, 0.0235, num_plain=8, num_other=8, in_turn=True),  # 6 %, and sure: names no cause
        account(0.030, 0.023),  # not in turn: the machine may have drifted
        account(0.040, 0.023, spread=0.5, num_plain=4, in_turn=True),  # nobody knows
        account(0.060, 0.023, spread=0.5),
        account(0.423, 0.023, num_other=3),
        account(0.423, 0.023, num_plain=3, num_other=3, in_turn=True),
        account(0.023, 0.423, cost_s=math.inf),  # looking costs something
        Account(plain_s=(), other_s=()),
    ],
)
def test_small_or_unsure_differences_contradict_nothing(one):
    assert not one.contradicts(WORTHWHILE)


@pytest.mark.parametrize(
    ("one", "is_open"),
    [
        (account(0.018, 0.347, num_plain=4, num_other=1), True),  # no time was left to measure in turn
        (account(0.347, 0.018, num_plain=3, num_other=3, in_turn=True), True),
        (Account(plain_s=(0.018, 0.35, 0.019, 0.018), other_s=(0.34, 0.35, 0.02, 0.35), in_turn=True), True),
        (account(0.423, 0.023), True),
        (account(0.060, 0.023, spread=0.5), False),
        (account(0.030, 0.023), False),
        (account(0.023, 0.423, cost_s=math.inf), False),
        (Account(plain_s=(), other_s=()), False),
    ],
)
def test_medians_that_lie_further_apart_than_drift_and_both_spreads_leave_the_account_open(one, is_open):
    assert one.is_open(WORTHWHILE) is is_open
    assert bool(diagnosed({"taken apart": one}).contradictions) is is_open


def test_swapping_the_sides_of_a_contradiction_leaves_it_one():
    lots = random.Random(3)
    for _ in range(200):
        in_turn, ratio, spread = lots.random() < 0.5, lots.uniform(0.3, 3), lots.uniform(0, 0.3)
        one = account(0.02, 0.02 * ratio, spread=spread, num_other=8, in_turn=in_turn, cost_s=0.0)
        other = replace(one, plain_s=one.other_s, other_s=one.plain_s)
        assert one.contradicts(WORTHWHILE) == other.contradicts(WORTHWHILE)


def test_equal_steps_hardly_ever_contradict_each_other_however_noisy_they_are():
    lots = random.Random(7)
    raised = 0
    for _ in range(1000):
        spread = lots.choice([0.01, 0.05, 0.2, 0.5])
        plain_s, other_s = (tuple(0.02 * 2.7 ** lots.gauss(0, spread) for _ in range(8)) for _ in range(2))
        raised += Account(plain_s=plain_s, other_s=other_s, in_turn=True).contradicts(WORTHWHILE)
        raised += Account(plain_s=plain_s, other_s=other_s[:4]).contradicts(WORTHWHILE)
    assert raised <= 20


def test_what_recording_is_known_to_cost_a_short_step_contradicts_nothing():
    one = account(100e-6, 160e-6, num_other=8, in_turn=True)
    assert not one.contradicts(WORTHWHILE) and replace(one, cost_s=0.0).contradicts(WORTHWHILE)
    assert replace(one, plain_s=one.other_s, other_s=one.plain_s).contradicts(WORTHWHILE)
    assert account(0.02, 0.03, num_other=8, in_turn=True, cost_s=RECORDING_S).contradicts(WORTHWHILE)


# -- what follows ------------------------------------------------------------------------------------------------------


def test_a_contradiction_is_said_with_both_numbers_their_spreads_and_what_it_may_come_from():
    assert CONTRADICTED.binding == "not concluded" and CONTRADICTED.binding not in BINDINGS
    said = CONTRADICTED.sentence
    assert said.startswith("not concluded: a step takes 42") and "ms ± 1 % in plain windows and 2" in said
    assert "where it is taken apart; perhaps another thread of the script holds the interpreter" in said
    assert CONTRADICTED.contradictions and CONTRADICTED.achieved_flops_per_s is None


def test_an_account_that_closes_is_concluded_as_before():
    closes = {"taken apart": account(0.0231, 0.0230), "sampled": account(0.023, 0.030, cost_s=math.inf)}
    found = diagnosed(closes)
    assert repr(found) == repr(diagnosed({})) and found.binding == "compute" and found.contradictions == ()


def test_bounds_of_a_contradicted_account_are_no_facts_but_those_that_were_measured_in_pairs_are():
    ratio = Comparison(verdict="faster", ratio=1.2, low=1.15, high=1.25, low99=1.1, high99=1.3, num_pairs=8)
    found = diagnosed({"taken apart": account(0.423, 0.023)}, counterfactuals={"free_data": ratio})
    assert {b.remedy: b.ratio for b in found.bounds} == {"free data": 1.2} and CONTRADICTED.bounds == ()


def test_too_many_threads_were_seen_in_pairs_and_are_named_even_so():
    ratio = Comparison(verdict="faster", ratio=3.0, low=2.5, high=3.5, low99=2.4, high99=3.6, num_pairs=8)
    found = diagnosed(
        {"taken apart": account(0.423, 0.023)},
        counterfactuals={"fitting_threads": ratio},
        facts=replace(FACTS, num_threads=8),
    )
    assert found.binding == "thread oversubscription" and [b.remedy for b in found.bounds] == ["threads that fit"]
    assert found.evidence == found.contradictions != ()


def test_a_step_that_is_faster_while_it_is_sampled_is_not_the_one_that_the_samples_tell_of():
    found = diagnosed({"sampled": account(0.423, 0.023, cost_s=math.inf)})
    assert found.binding == "not concluded" and "where it is sampled" in found.sentence


def test_phases_that_sum_to_far_more_than_the_step_are_no_account():
    found = diagnosed({}, {**SPENT, "unattributed": -0.004})
    assert found.binding == "not concluded" and "the phases sum to 21 % more than the step" in found.sentence


@pytest.mark.parametrize("command", ["why", "tune"])
def test_terminal_and_page_say_that_nothing_is_concluded_and_call_the_step_that_was_taken_apart_so(command):
    for verdict in ("no difference", "inconclusive"):
        found = result(command=command, diagnosis=CONTRADICTED, verdict=verdict, plan=None, remeasured=None)
        text = on_screen(found, width=200)
        assert "not concluded: a step takes" in text and "bound by not concluded" not in text
        assert "at most" not in text.split("binding")[0] and "compute" not in text
        page = on_page(found)
        assert "not concluded" in page and "bound by not concluded" not in page and "Taken apart:" in page
    assert "what binds is not concluded" in said_of.headline(replace(found, command="why")).sentence


def test_steps_that_were_sampled_are_not_drawn_among_those_of_the_plain_script():
    steps = tuple(TimelineStep(start_s=n, step_s=0.1, group=group) for n, group in enumerate(("baseline", "stacks")))
    assert [dot.kind for dot in thinned.dots(result(timeline=steps))] == ["plain", "aside"]


def test_json_says_it_too():
    found = summary_of(result(command="why", diagnosis=CONTRADICTED))
    assert found["binding"] == "not concluded" and found["bounds"] == {}
    assert found["contradictions"] == list(CONTRADICTED.contradictions)
    assert summary_of(result(command="why"))["contradictions"] == []


def test_input_that_brings_more_than_free_data_is_said_to_contradict_it():
    free = Bound(remedy="free data", ratio=1.2, low=1.1, high=1.3, how="", shortens=("data",))
    for low, contradicts in ((1.35, True), (1.25, False)):
        workers = trial({"workers": {"num": 2}}, 1.5, ratio_low=low, ratio_high=1.6)
        found = result(input_trial=workers, diagnosis=replace(diagnosed({}), bounds=(free,)))
        assert ("contradict each other" in tried.input_reached(found)) == contradicts


# -- how it is measured ------------------------------------------------------------------------------------------------


class Bench:
    """Windows of a step that takes as long as `step_s` says of how it is observed and the number of windows so far."""

    def __init__(self, step_s, foreign_fraction=0.0):
        self.step_s, self.foreign_fraction, self.noise = step_s, foreign_fraction, 0.0
        self.windows, self.lots, self.size = [], random.Random(0), Size(num_steps=2, skip_steps=0, loader_skip_steps=0)

    def window(self, levers, *, purpose, observe, skip):
        step_s = self.step_s(observe, len(self.windows)) * self.lots.uniform(0.99, 1.01)
        found = window((step_s,) * 2, purpose=purpose, observe=observe, foreign_fraction=self.foreign_fraction)
        self.windows.append(("", found))
        return found


def looked_at(bench, tmp_path, num_plain=8, later_s=1e9):
    budget = SimpleNamespace(deadline_s=lambda share=0.0: later_s)
    plain = Baseline(bench, budget, None, tmp_path, print)
    for _ in range(num_plain):
        bench.window({}, purpose="baseline", observe="ends", skip=0)
    plain.baseline = plain._seen("baseline", "ends")
    plain._take_apart(later_s)
    return plain, plain._account("anatomy", "phases")


def test_a_step_that_is_the_same_when_taken_apart_costs_no_further_window(tmp_path):
    plain, found = looked_at(bench := Bench(lambda observe, num: 0.02), tmp_path)
    assert not found.contradicts(WORTHWHILE) and not found.in_turn and len(bench.windows) == 12
    assert plain.anatomy.num_windows == 4


def test_steps_that_are_many_times_apart_on_a_quiet_machine_contradict_each_other_at_once(tmp_path):
    _, found = looked_at(bench := Bench(lambda observe, num: 0.4 if observe == "ends" else 0.02), tmp_path)
    assert found.contradicts(WORTHWHILE) and len(bench.windows) == 12


@pytest.mark.parametrize(("plain_s", "foreign_fraction"), [(0.03, 0.0), (0.4, 0.6)])
def test_what_only_seems_to_contradict_is_measured_in_turn(plain_s, foreign_fraction, tmp_path):
    bench = Bench(lambda observe, num: plain_s if observe == "ends" else 0.02, foreign_fraction)
    _, found = looked_at(bench, tmp_path)
    assert len(bench.windows) > 18 and found.contradicts(WORTHWHILE)


@pytest.mark.parametrize(("before_s", "foreign_fraction"), [(0.03, 0.0), (0.4, 0.6)])
def test_a_machine_that_changed_meanwhile_contradicts_nothing(before_s, foreign_fraction, tmp_path):
    bench = Bench(lambda observe, num: before_s if num < 8 else 0.02, foreign_fraction)
    _, found = looked_at(bench, tmp_path)
    assert found.in_turn and not found.contradicts(WORTHWHILE)


def test_steps_that_are_always_many_times_as_fast_contradict_plain_ones_however_much_they_scatter(tmp_path):
    lots = random.Random(5)
    bench = Bench(lambda observe, num: 1.8 if observe == "ends" else 10 ** lots.uniform(-3, -0.4), 0.9)
    _, found = looked_at(bench, tmp_path)
    assert found.contradicts(WORTHWHILE)


def test_where_the_budget_is_spent_nothing_more_is_measured_and_nothing_contradicted(tmp_path):
    bench = Bench(lambda observe, num: 0.03 if observe == "ends" else 0.02)
    _, found = looked_at(bench, tmp_path, later_s=0.0)
    assert not found.contradicts(WORTHWHILE) and len(bench.windows) == 9
