"""Levers screened together: which windows are asked for, and what becomes of levers that break or disagree."""

import contextlib
import math
import random

import pytest

from flatout.judge.agreement import Judgement
from flatout.records.plan import Candidate
from flatout.trials.search.effects import Effects
from flatout.trials.search.screen import AGREES, Answer, screen
from flatout.trials.search.space import Space, begun_with
from handmade import lever, registry

LEVERS = registry(
    lever("a"),
    lever("b"),
    lever("c", class_="precision"),
    lever("items", class_="exact", check="batches", shortens=("data",), toggles="epoch"),
    lever("slow", compiles=True),
)
DISAGREES = Judgement(verdict="disagrees", detail="another number")


def space(*names):
    known = {name: LEVERS[name] for name in names or LEVERS}
    return Space(singles=tuple(Candidate(levers={name: {}}) for name in known), untried=(), levers=known)


def screened(where, answer, most=200, seed=0):
    """What comes of it, and what was asked."""
    asks = []
    asking = screen(where, lambda gain: len(asks) < most, random.Random(seed))
    try:
        ask = next(asking)
        while True:
            asks.append(ask)
            ask = asking.send(answer(ask))
    except StopIteration as end:
        return end.value, asks


def machine(gains, *, broken=(), disagree=(), idle=(), noise=0.01, seed=0):
    """Answers of a machine on which levers multiply."""
    lots = random.Random(seed)

    def answer(ask):
        if ask.what != "window":
            bad = any(name in disagree for name in ask.levers)
            return Answer(judgement=DISAGREES if bad else AGREES)
        if any(set(part) <= set(ask.levers) for part in broken):
            return Answer(failure="it broke")
        speed = math.prod(gains.get(name, 1.0) for name in ask.levers)
        return Answer(
            step_s=lots.lognormvariate(0.0, noise) / speed,
            missing={name: "not seen" for name in ask.levers if name in idle},
            evidence={name: "seen" for name in ask.levers if name not in idle},
        )

    return answer


def names(trial):
    return "+".join(trial.levers)


def test_every_lever_has_its_effect_from_all_windows_and_the_best_set_is_last():
    found, asks = screened(space(), machine({"a": 1.2, "b": 0.8, "c": 1.1}))
    alone = {names(t): t for t in found.trials}
    assert {*alone} == {"a", "b", "c", "items", "a+c"} and found.is_settled
    for name, truth in {"a": 1.2, "b": 0.8, "c": 1.1, "items": 1.0}.items():
        assert alone[name].ratio_low < truth < alone[name].ratio_high
        assert alone[name].outcome == "screened" and alone[name].num_windows == found.num_windows
    best = found.trials[-1]
    assert names(best) == "a+c" and best.agreement == "agrees" and best.class_ == "precision"
    assert best.evidence == {"a": "seen", "c": "seen"}
    assert not any("slow" in ask.levers for ask in asks), "what compiles is tried by itself"
    assert found.num_windows < 40


def test_where_nothing_helps_plain_is_the_best_and_no_numbers_are_compared():
    found, _ = screened(space(), machine({"a": 0.9, "b": 0.95}))
    assert found.is_settled and all(t.ratio < 1.02 for t in found.trials)


def test_a_lever_that_brings_nothing_seldom_has_a_place_in_the_best_set():
    best = [
        names(screened(space("a", "b", "c"), machine({"a": 1.3}, seed=seed), seed=seed)[0].trials[-1])
        for seed in range(10)
    ]
    assert all("a" in one for one in best) and best.count("a") >= 7


def test_items_are_compared_before_a_window_runs_with_them():
    found, asks = screened(space(), machine({"items": 3.0, "a": 1.2}, disagree=["items"]))
    assert [ask.levers for ask in asks if ask.what == "batches"] == [{"items": {}}]
    assert not any("items" in ask.levers for ask in asks if ask.what == "window")
    bad = next(t for t in found.trials if "items" in t.levers)
    assert (bad.outcome, bad.agreement, bad.reason) == ("disagrees", "disagrees", "another number")
    assert "a" in found.trials[-1].levers


def test_of_a_set_that_breaks_the_lever_that_breaks_alone_leaves():
    found, asks = screened(space("a", "b", "c"), machine({"a": 1.2, "b": 2.0}, broken=["b"]))
    assert [(names(t), t.reason) for t in found.trials if t.outcome == "failed"] == [("b", "it broke")]
    assert names(found.trials[-1]) == "a"
    blamed = [number for number, ask in enumerate(asks) if "b" in ask.levers]
    assert len(blamed) <= 3, "once found it never runs again"


def test_of_levers_that_break_only_together_no_set_with_both_runs_again():
    found, asks = screened(space("a", "b", "c"), machine({"a": 1.3, "b": 1.2, "c": 1.1}, broken=["ab"]))
    assert [names(t) for t in found.trials if t.outcome == "failed"] != []
    assert names(found.trials[-1]) in ("a+c", "a")
    assert {"a", "b", "c"} >= {name for t in found.trials for name in t.levers}
    assert sum({"a", "b"} <= set(ask.levers) for ask in asks) <= 2


def test_what_broke_when_it_was_taken_back_is_looked_for_in_the_window_before():
    before = []

    def answer(ask):
        was, before[:] = "b" in before, ask.levers
        if ask.what == "window" and was and "b" not in ask.levers:
            return Answer(failure="`b` could not be taken back", at_release=True)
        return machine({"a": 1.2})(ask)

    found, _ = screened(space("a", "b"), answer)
    assert [names(t) for t in found.trials if t.outcome == "failed"] == ["b"]
    assert names(found.trials[-1]) == "a"


def test_a_lever_that_shows_no_effect_leaves():
    found, asks = screened(space("a", "b", "c"), machine({"a": 1.2}, idle=["b"]))
    assert [(names(t), t.reason) for t in found.trials if t.outcome == "failed"] == [
        ("b", "b took no effect: not seen")
    ]
    assert sum("b" in ask.levers for ask in asks) == 3


def test_a_best_set_that_disagrees_loses_the_lever_that_disagrees_alone():
    found, asks = screened(space("a", "b", "c"), machine({"a": 1.2, "b": 1.3, "c": 1.1}, disagree=["b"]))
    assert [names(t) for t in found.trials if t.outcome == "disagrees"] == ["b"]
    assert names(found.trials[-1]) == "a+c" and found.trials[-1].agreement == "agrees"
    assert {"+".join(ask.levers) for ask in asks if ask.what == "numbers"} >= {"a+b+c", "b", "a+c"}


def test_levers_that_disagree_only_together_lose_the_set_and_not_the_levers():
    def answer(ask):
        if ask.what == "numbers":
            return Answer(judgement=DISAGREES if {"a", "b"} <= set(ask.levers) else AGREES)
        return machine({"a": 1.3, "b": 1.2})(ask)

    found, _ = screened(space("a", "b", "c"), answer)
    assert names(found.trials[-1]) == "a" and found.trials[-1].agreement == "agrees"


def test_when_the_time_is_over_the_best_so_far_is_judged_and_nothing_is_claimed_to_be_known():
    found, asks = screened(space(), machine({"a": 1.5}, noise=0.2), most=6)
    assert not found.is_settled and len(asks) <= 8
    assert found.trials[-1].agreement in ("agrees", "")


def test_windows_that_count_for_nothing_are_measured_again():
    lots = random.Random(1)

    def answer(ask):
        whole = machine({"a": 1.2})(ask)
        return Answer(step_s=None) if ask.what == "window" and lots.random() < 0.5 else whole

    found, asks = screened(space("a", "b"), answer)
    assert found.num_windows < len(asks) and names(found.trials[-1]) == "a"


def test_a_script_whose_windows_never_count_ends_it():
    found, asks = screened(space("a"), lambda ask: Answer(step_s=None), most=10_000)
    assert len(asks) == 20 and not found.is_settled and not found.trials


def test_who_measures_is_told_what_the_best_so_far_should_bring():
    told = []
    asking = screen(space("a"), lambda gain: told.append(gain) or len(told) < 30, random.Random(0))
    answer, ask = machine({"a": 2.0}), next(asking)
    with contextlib.suppress(StopIteration):
        while True:
            ask = asking.send(answer(ask))
    assert told[0] == 1.0 and told[-1] == pytest.approx(2.0, rel=0.1)


def test_the_plan_that_is_there_runs_in_the_second_window():
    where = begun_with(space("a", "b", "c"), {"a": {}, "c": {}})
    _, asks = screened(where, machine({"a": 1.2}))
    assert [set(ask.levers) for ask in asks[:2]] == [set(), {"a", "c"}]


def test_without_levers_there_is_nothing_to_ask():
    found, asks = screened(space("slow"), machine({}))
    assert not asks and not found.trials and found.is_settled


# -- the model ---------------------------------------------------------------------------------------------------------


def effects(num, gains, *, noise=0.02, drift=0.0, windows=24, seed=0, burst=0.0, partners=()):
    lots = random.Random(seed)
    singles = [{f"l{i}": {}} for i in range(num)]
    found = Effects(singles, lambda levers: True, lambda a, b: {*a, *b} == {*partners}, lots)
    at = 0.0
    for _ in range(windows):
        levers = found.next()
        at = 0.9 * at + lots.gauss(0, drift)
        log = -sum(g for part, g in gains.items() if {*part.split("+")} <= {*levers}) + at + lots.gauss(0, noise)
        found.saw(levers, math.exp(log + (1.0 if lots.random() < burst else 0.0)))
    return found


def test_eight_levers_are_known_to_a_few_percent_from_forty_windows_of_four_percent_noise():
    gains = {"l0": 0.3, "l1": 0.1, "l2": -0.2, "l3": 0.05}
    found = effects(8, gains, noise=0.04, windows=40)
    for i in range(8):
        ratio, low, high = found.brings({f"l{i}": {}}, {})
        assert low < ratio < high and high / low < 2.5
        assert low / 1.05 < math.exp(gains.get(f"l{i}", 0.0)) < high * 1.05
    assert {"l0"} <= set(found.best())


@pytest.mark.parametrize(("burst", "least"), [(0.0, 24), (0.05, 20)])
def test_intervals_hold_the_truth_although_the_machine_drifts_and_others_burst_in(burst, least):
    """Of thirty; a burst makes one window in twenty 2.7 times as long, and nothing else tells of it."""
    gains = {"l0": 0.2, "l1": -0.1}
    held = 0
    for seed in range(6):
        found = effects(5, gains, noise=0.02, drift=0.02, burst=burst, windows=50, seed=seed)
        for i in range(5):
            _, low, high = found.brings({f"l{i}": {}}, {})
            held += low <= math.exp(gains.get(f"l{i}", 0.0)) <= high
    assert held >= least


def test_what_two_levers_bring_only_together_is_found():
    found = effects(6, {"l0": -0.1, "l1": -0.1, "l0+l1": 0.5}, partners=("l0", "l1"), windows=40)
    assert {"l0", "l1"} <= set(found.best())


def test_many_levers_have_too_many_sets_to_list_and_the_best_is_found_even_so():
    found = effects(16, {f"l{i}": 0.1 for i in range(0, 16, 2)}, windows=80)
    assert len({f"l{i}" for i in range(0, 16, 2)} & set(found.best())) >= 6


def test_a_window_that_others_disturbed_counts_for_less():
    calm, busy = (Effects([{"a": {}}], lambda levers: True, lambda a, b: False, random.Random(0)) for _ in range(2))
    for found, share in ((calm, 0.0), (busy, 0.5)):
        for step_s in (1.0, 1.01, 0.99, 1.0):
            found.saw({}, step_s)
            found.saw({"a": {}}, step_s / 1.2)
        found.saw({"a": {}}, 2.0, share)
    assert busy.brings({"a": {}}, {})[0] > calm.brings({"a": {}}, {})[0] * 0.999
    assert busy.brings({"a": {}}, {})[0] == pytest.approx(1.2, rel=0.05)


def test_what_others_take_of_the_machine_is_learned_and_taken_out():
    """Windows of which others took up to 40 % tell of levers about as much as calm ones."""
    spread = []
    for share in (0.0, 0.4):
        lots = random.Random(1)
        found = Effects([{f"l{i}": {}} for i in range(4)], lambda levers: True, lambda a, b: False, lots)
        for _ in range(24):
            levers, taken = found.next(), lots.uniform(0, share)
            found.saw(levers, lots.lognormvariate(taken - 0.1 * ("l0" in levers), 0.01), taken)
        ratio, low, high = found.brings({"l0": {}}, {})
        assert low / 1.02 < math.exp(0.1) < high * 1.02 and ratio == pytest.approx(math.exp(0.1), rel=0.03)
        spread.append(math.log(high / low))
    assert spread[1] < 3 * spread[0]


def test_settings_of_one_lever_never_run_together():
    singles = [{"n": {"num": 1}}, {"n": {"num": 2}}, {"a": {}}]
    found = Effects(singles, lambda levers: True, lambda a, b: False, random.Random(0))
    seen = set()
    for _ in range(20):
        levers = found.next()
        seen.add(tuple(sorted((name, tuple(s.items())) for name, s in levers.items())))
        found.saw(levers, 1.0)
    assert len(seen) <= 6
