"""What is measured again, and what comes of it? With measurements made by hand."""

import math
import time
from dataclasses import replace

import pytest

from flatout.judge.agreement import Judgement
from flatout.judge.diagnosis import Diagnosis
from flatout.judge.paired import Pairs
from flatout.records.ceilings import Accelerator
from flatout.records.plan import Candidate
from flatout.run.script import Script
from flatout.trials import tune
from flatout.trials.budget import Size
from flatout.trials.child_failures import CandidateFailed
from flatout.trials.conduct import Conduct
from flatout.trials.search.space import Choice, space_of
from flatout.trials.terms import Goal, Show
from handmade import FACTS, HEADER, MACHINE, lever, registry, screened, trial, window

LUCKY = trial({"workers": {"num": 1}}, 1.41, "inconclusive", ratio_low=1.17)
SURE = trial({"bf16": {}}, 1.33, ratio_low=1.22)
NOTHING = Diagnosis(binding="unknown", sentence="", evidence=(), bounds=())
HELD = {"outcome": "faster", "ratio": 1.3, "remeasured": True}
LOST = {"outcome": "inconclusive", "ratio": 1.1, "remeasured": True}


@pytest.fixture
def conduct(tmp_path):
    script = Script(path="train.py")
    return Conduct(script, tmp_path, MACHINE, Goal(), Show())


def prove(conduct, **outcomes):
    """Measure again: what comes of each lever stands in `outcomes`."""
    conduct.trials = [SURE, LUCKY]
    again = []

    def measure(found, leave_s=0.0):
        again.append(found)
        return replace(found, **outcomes[next(iter(found.levers))])

    conduct._measure_again = measure
    conduct.remeasure()
    return again


def test_a_best_that_holds_is_the_only_one_measured_again(conduct):
    assert prove(conduct, workers=HELD) == [LUCKY]
    assert conduct.final.levers == LUCKY.levers and conduct.trials == [SURE, LUCKY]


def test_where_the_best_was_lucky_a_set_that_was_seen_to_be_faster_has_its_turn(conduct):
    assert prove(conduct, workers=LOST, bf16=HELD) == [LUCKY, SURE]
    assert conduct.final.levers == SURE.levers and conduct.final.is_won
    assert conduct.trials == [SURE, replace(LUCKY, **LOST)]


def test_where_neither_holds_both_are_shown_as_they_were_measured_last(conduct):
    prove(conduct, workers=LOST, bf16=LOST)
    assert conduct.final == replace(LUCKY, **LOST)
    assert conduct.trials == [replace(SURE, **LOST), LUCKY]


def test_plain_against_itself_is_measured_again_whatever_the_screening_showed(tmp_path):
    goal = Goal(choice=Choice(only=()))
    one = Conduct(Script(path="train.py"), tmp_path, MACHINE, goal, Show())
    assert one.against_itself and not Conduct(Script(path="train.py"), tmp_path, MACHINE, Goal(), Show()).against_itself
    one.trials = [trial({}, 0.99, "inconclusive")]
    one._measure_again = lambda found, leave_s=0.0: replace(found, outcome="no difference", remeasured=True)
    one.remeasure()
    assert one.final.levers == {} and one.final.outcome == "no difference"


@pytest.mark.parametrize(("disturbed", "num_measured"), [((), 4), ((0, 2), 6), (range(99), 10)])
def test_a_step_is_taken_apart_until_enough_windows_were_calm(conduct, monkeypatch, disturbed, num_measured):
    plain, seen = conduct.plain, []

    def measured(levers, *, purpose, observe, skip):
        foreign = 0.5 if len(seen) in disturbed else 0.0
        one = window(phases={"forward": (0.004, 0.004)}, purpose=purpose, observe=observe, foreign_fraction=foreign)
        seen.append((None, one))
        return one

    monkeypatch.setattr(plain.bench, "window", measured)
    plain.bench.windows, plain.bench.size = seen, Size(num_steps=2, skip_steps=0, loader_skip_steps=0)
    plain._take_apart(math.inf)
    assert len(seen) == num_measured and plain.anatomy.num_windows == (4 if num_measured < 10 else 10)


def searched(conduct, monkeypatch, step_s=0.01, **ratios):
    """Try all of a small space; each lever is as fast as `ratios` says."""
    conduct.bench.facts, conduct.bench.header = FACTS, HEADER
    conduct.bench.step_guess_s = step_s
    conduct.levers = conduct.bench.levers = registry(lever("a", shortens=("forward",)), lever("b", compiles=True))
    conduct.plain.diagnosis = Diagnosis(binding="compute", sentence="compute", evidence=(), bounds=())

    def speed(levers):
        return math.prod(ratios[name] for name in levers)

    monkeypatch.setattr(
        "flatout.trials.conduct.screened", lambda bench, space, *more, **when: screened(space, speed)[0]
    )
    monkeypatch.setattr(conduct, "beside_plain", lambda best: trial(best.levers, speed(best.levers)))
    conduct.try_out = lambda candidate: trial(candidate.levers, speed(candidate.levers))
    conduct.try_all()
    return [set(t.levers) for t in conduct.trials]


def test_a_search_that_is_done_was_not_stopped(conduct, monkeypatch):
    assert searched(conduct, monkeypatch, a=1.5, b=1.2) == [{"a"}, {"a", "b"}, {"b"}]
    assert conduct.stopped == "" and not conduct.untried


def short_script(conduct, budget_s):
    """One that runs 2 s in all, and takes 4 s to start."""
    conduct.budget.__init__(budget_s)
    bench = conduct.bench
    bench.size = Size(num_steps=60, skip_steps=2, loader_skip_steps=2)
    bench.longest_run_steps, bench.start_s = 250, 4.0
    bench.windows.append(("1", window(foreign_fraction=0.0)))


def test_where_starts_leave_time_for_nothing_the_search_ends_at_once_and_says_so(conduct, monkeypatch):
    short_script(conduct, 15.0)
    assert searched(conduct, monkeypatch, step_s=0.008, a=1.5, b=1.2) == []
    assert conduct.stopped == (
        "the budget of 15 s was too short for a first candidate; a run of it has 250 steps, and each start takes 4.0 s"
    )
    assert {one.lever for one in conduct.untried} >= {"a", "b"} and conduct.short_budget_s == 15.0


def test_screening_leaves_time_to_measure_its_best_again_starts_included(conduct, monkeypatch):
    short_script(conduct, 60.0)
    conduct.bench.step_guess_s = 0.008
    pair_s = 2 * 62 * (0.008 + 4.0 / 250)
    ends = []
    monkeypatch.setattr(
        "flatout.trials.conduct.screened",
        lambda bench, space, *more, until_s: ends.append(until_s) or screened(space, lambda levers: 1.0)[0],
    )
    searched_s = time.perf_counter()
    space = space_of(registry(lever("a")), FACTS, MACHINE, NOTHING, Choice())
    conduct._screen(space)
    left_s = conduct.budget.deadline_s() - ends[0]
    assert left_s >= 9 * pair_s and ends[0] - searched_s >= 4 * pair_s


def test_the_best_is_measured_again_within_the_budget_though_others_disturb_every_window(conduct, monkeypatch):
    conduct.budget.__init__(1e-6)
    conduct.levers = conduct.bench.levers = registry(lever("a"))
    num = []
    monkeypatch.setattr(
        conduct.bench, "window", lambda levers, **how: num.append(1) or window((0.01,), foreign_fraction=0.9)
    )
    monkeypatch.setattr(conduct, "_with_agreement", lambda found, known, begun_s: found)
    found = conduct._measure_again(trial({"a": {}}, 1.3, agreement="agrees"))
    assert found.outcome == "inconclusive" and found.num_pairs == 0 and len(num) == 2


def test_what_does_not_fit_into_the_usual_time_may_take_longer_where_nothing_was_asked_for(conduct, monkeypatch):
    monkeypatch.setattr(conduct, "_fits", lambda candidate: conduct.budget.total_s >= 120)
    assert conduct._bears(Candidate(levers={"b": {}})) and conduct.budget.total_s == 75, "nothing was tried yet"
    assert {"b"} in searched(conduct, monkeypatch, a=1.5, b=1.2) and conduct.budget.total_s == 120
    conduct.budget.__init__(60.0)
    assert not conduct._bears(Candidate(levers={"b": {}})) and conduct.budget.total_s == 60


def test_free_data_is_left_for_later_where_measuring_it_would_delay_the_first_trial(conduct, monkeypatch):
    plain, asked = conduct.plain, []
    plain.bench.facts = replace(FACTS, loaders=FACTS.loaders[:1])
    monkeypatch.setattr(plain, "_measure_counterfactuals", lambda share: asked.append(share) or {})
    monkeypatch.setattr(plain, "_diagnose", lambda *_: None)
    monkeypatch.setattr("flatout.trials.baseline.windows.wait_for_quiet", lambda *_: True)
    monkeypatch.setattr(plain, "_take_apart", lambda until_s: None)
    plain.bench.step_guess_s = 0.001
    plain.observe(0.15)
    plain.bench.step_guess_s = 10.0
    plain.observe(0.15)
    assert asked == [0.15]


def test_a_former_plan_that_the_budget_does_not_bear_makes_room_for_what_it_bears(conduct, monkeypatch):
    first = Candidate(levers={"a": {}, "b": {}})
    conduct.own = first.levers
    conduct._fits = lambda candidate: candidate.key != first.key
    assert searched(conduct, monkeypatch, a=1.5, b=0.9)[0] == {"a"}
    assert conduct.stopped == "the budget of 75 s was too short for more", "the same set, compiled on top"


def test_two_starts_of_the_script_that_cannot_reach_the_best_are_enough(conduct, monkeypatch):
    conduct.trials = [trial({"bf16": {}}, 2.0, ratio_low=1.9)]
    monkeypatch.setattr(conduct.bench, "start", lambda process=None: None)
    monkeypatch.setattr(
        conduct.bench,
        "window",
        lambda levers, purpose, skip=None, num_steps=None: window((0.01, 0.01) if not levers else (0.0065, 0.0065)),
    )
    found = conduct._measure(Candidate(levers={"bf16": {}, "heap": {}}))
    assert len(found.baseline_s) == 2
    assert found.given_up == "2 pairs, both below 1.77, where 1.90 was to be beaten: not pursued"
    conduct.trials = []
    assert len(conduct._measure(Candidate(levers={"bf16": {}, "heap": {}})).baseline_s) == 4


def test_a_window_for_which_a_process_was_started_is_longer(conduct, monkeypatch):
    asked = []
    monkeypatch.setattr(conduct.bench, "start", lambda process=None: None)
    monkeypatch.setattr(
        conduct.bench,
        "window",
        lambda levers, purpose, skip=None, num_steps=None: asked.append((purpose, num_steps)) or window((0.01, 0.01)),
    )
    conduct._measure(Candidate(levers={"heap": {}}))
    lengths = {num for purpose, num in asked if purpose != "warm-up"}
    assert [num * conduct.bench.step_guess_s for num in lengths] == [pytest.approx(2.0, rel=0.2)]
    assert {num for purpose, num in asked if purpose == "warm-up"} == {None}


def test_pairs_of_processes_go_on_where_only_one_candidate_had_some(conduct, monkeypatch):
    conduct.levers = conduct.bench.levers = registry(
        lever("heap", toggles="process"), lever("numa", toggles="process"), lever("a")
    )
    four = {"baseline_step_s": (1.2,) * 4, "candidate_step_s": (1.0,) * 4, "candidate_first": (True,) * 4}
    heap = trial({"heap": {}}, 1.2, **four)
    conduct.trials = [heap, trial({"a": {}}, 1.0)]
    assert conduct._only_pairs(heap).ratios == [pytest.approx(1.2)] * 4
    conduct.trials += [trial({"numa": {}}, 1.1)]
    assert conduct._only_pairs(heap) is None, "the best of two may be the luckier one"


@pytest.mark.parametrize("promises", [True, False])
def test_what_is_allowed_for_a_promise_is_allowed_to_its_trials_too(conduct, monkeypatch, promises):
    monkeypatch.setattr("flatout.trials.search.strategy.promises_a_process", lambda space: promises)
    searched(conduct, monkeypatch, a=1.5, b=1.2)
    assert (conduct.budget.total_s > 75) == promises
    assert conduct.bench.deadline_s == conduct.budget.deadline_s()


@pytest.mark.parametrize(("over_s", "num"), [(10.0, 4), (100.0, 1)])
def test_measuring_again_in_processes_goes_on_past_the_budget_until_there_is_a_verdict(
    conduct, monkeypatch, over_s, num
):
    conduct.levers = conduct.bench.levers = registry(lever("heap", toggles="process"))
    monkeypatch.setattr(conduct.bench, "start", lambda process=None: None)
    monkeypatch.setattr(
        conduct.bench,
        "window",
        lambda levers, purpose, skip=None, num_steps=None, **more: window((0.01, 0.01)),
    )
    monkeypatch.setattr(conduct, "_with_agreement", lambda found, known, begun_s: found)
    monkeypatch.setattr(conduct, "_take_apart_winner", lambda levers: None)
    end_s = time.perf_counter() - over_s
    monkeypatch.setattr(conduct.budget, "deadline_s", lambda share=1.0: end_s)
    assert conduct.budget.total_s == 75
    assert conduct._measure_again(trial({"heap": {}}, 1.3)).num_pairs == num


@pytest.mark.parametrize(("left_s", "judged"), [(30.0, 1), (5.0, 0)])
def test_numbers_that_agreed_are_compared_again_where_there_is_time(conduct, monkeypatch, left_s, judged):
    again = []
    conduct.levers = conduct.bench.levers = registry(lever("a"))
    step_s = [1.0 + number / 1000 for number in range(16)]
    pairs = Pairs(baseline_s=[2.0] * 16, candidate_s=step_s)
    monkeypatch.setattr(conduct, "_measured", lambda *_: pairs)
    monkeypatch.setattr(conduct, "_take_apart_winner", lambda levers: None)
    monkeypatch.setattr(conduct, "judge", lambda *_: again.append(1) or Judgement(verdict="agrees", detail="later"))
    monkeypatch.setattr(type(conduct.budget), "left_s", left_s)
    conduct.judging_s = 10.0
    found = conduct._measure_again(trial({"a": {}}, 1.9, agreement="agrees", agreement_detail="at first"))
    assert found.is_won and len(again) == judged
    assert found.agreement_detail == ("later" if judged else "at first")


def test_what_gave_no_answer_while_it_was_compared_is_not_called_wrong(conduct, monkeypatch):
    conduct.levers = conduct.bench.levers = registry(lever("a"))

    def late(levers, checks):
        raise CandidateFailed("hung: no answer within its time limit", in_doubt=True)

    monkeypatch.setattr(conduct.bench, "agreement", late)
    judgement = conduct.judge({"a": {}}, "rounding")
    assert judgement.verdict == "inconclusive" and "no answer within its time limit" in judgement.detail


def test_when_the_final_measurement_began_and_ended_is_noted_for_its_energy(conduct, monkeypatch):
    conduct.levers = conduct.bench.levers = registry(lever("heap", toggles="process"))
    monkeypatch.setattr(conduct.bench, "start", lambda process=None: None)
    seen = []
    monkeypatch.setattr(
        conduct.bench,
        "window",
        lambda levers, purpose, **more: seen.append(time.perf_counter()) or window((0.01, 0.01)),
    )
    monkeypatch.setattr(conduct, "_with_agreement", lambda found, known, begun_s: found)
    monkeypatch.setattr(conduct, "_take_apart_winner", lambda levers: None)
    conduct._measure_again(trial({"heap": {}}, 1.3))
    begun_s, ended_s = conduct.joules.final_s["heap"]
    assert begun_s < seen[0] <= seen[-1] < ended_s < time.perf_counter()


@pytest.mark.parametrize(("check", "class_", "compared"), [("gradients", "rounding", "starts"), ("none", "exact", "")])
def test_what_needs_a_process_is_held_against_plain_in_starts_for_no_step_shows_both(
    conduct, monkeypatch, check, class_, compared
):
    asked = []
    agrees = Judgement(verdict="agrees", detail="")
    conduct.levers = conduct.bench.levers = registry(lever("a", toggles="process", check=check, class_=class_))
    monkeypatch.setattr(conduct.bench, "agreement", lambda levers, checks: asked.append("a step"))
    monkeypatch.setattr(conduct.starts, "judge", lambda *what: (asked.append("starts") or agrees, class_))
    assert conduct.judge({"a": {}}, class_).verdict == "agrees"
    assert "".join(asked) == compared


@pytest.mark.parametrize(
    ("device", "gpus", "asked"),
    [("cuda", 1, ["auto", "ended"]), ("cpu", 1, ["cpu"]), ("cpu", 0, ["auto"])],
)
def test_ceilings_are_those_of_what_the_script_computes_on_and_it_holds_no_gpu_meanwhile(
    conduct, monkeypatch, device, gpus, asked
):
    happened = []

    def ceilings(package, device, before, limit_s):
        assert limit_s > 0
        happened.append(device)
        before()

    conduct.bench.facts = replace(FACTS, device=device)
    conduct.machine = replace(MACHINE, accelerators=(Accelerator(name="GPU", memory_bytes=2**37),) * gpus)
    monkeypatch.setattr(conduct.bench, "end", lambda: happened.append("ended"))
    monkeypatch.setattr(tune.calibrate, "ceilings", ceilings)
    tune._ceilings(conduct)
    assert happened == asked


@pytest.mark.parametrize(
    ("device", "changes", "total_s"),
    [
        ("cpu", {}, 75.0),
        ("cuda", {}, 300.0),
        ("cuda", {"budget_s": 60.0}, 60.0),
        ("cuda", {"exactly": {"bf16": {}}}, 60.0),
    ],
)
def test_a_search_on_a_device_has_five_minutes_where_nothing_was_asked_for(tmp_path, device, changes, total_s):
    conduct = Conduct(Script(path="train.py"), tmp_path, MACHINE, replace(Goal(), **changes), Show())
    conduct.bench.facts = replace(FACTS, device=device)
    conduct._fit_budget(0.01)
    conduct._fit_budget(0.02)
    assert conduct.budget.total_s == total_s


@pytest.mark.parametrize(("device", "gpus", "warned"), [("cpu", 1, True), ("cuda", 1, False), ("cpu", 0, False)])
def test_who_trains_on_the_cpu_beside_a_gpu_is_told_so(conduct, monkeypatch, device, gpus, warned):
    conduct.machine = replace(MACHINE, accelerators=(Accelerator(name="NVIDIA H200", memory_bytes=2**37),) * gpus)
    conduct.bench.facts = replace(FACTS, device=device)
    for place, name in ((conduct.bench, "start"), (conduct.bench, "settle"), (conduct.plain, "observe")):
        monkeypatch.setattr(place, name, lambda *_: None)
    conduct.observe()
    assert any("`NVIDIA H200`" in text for text in conduct.bench.warnings) == warned
