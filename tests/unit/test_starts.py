"""Whole starts by turns, made by hand: what is started, compared, timed; and what the search makes of ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.errors import Inconclusive, RecordError, ScriptError, UsageError
from flatout.frameworks.lever import of_one_process, ranks_of
from flatout.frameworks.pytorch import levers as pytorch_levers
from flatout.frameworks.pytorch.numerics import trained
from flatout.judge import agreement, stats
from flatout.judge.diagnosis import Diagnosis
from flatout.judge.paired import SCREENING, Extent
from flatout.records.difference import Difference
from flatout.records.plan import Candidate, label
from flatout.records.ranks import RankConfig as RankTerms
from flatout.records.ranks import division, divisions
from flatout.records.trace import Agreement
from flatout.run import choice, on_ranks
from flatout.run.choice import Engagement
from flatout.run.rank_watch import Exchanges
from flatout.run.script import Script
from flatout.trials import starts, tune
from flatout.trials.child_failures import CandidateFailed
from flatout.trials.conduct import Conduct
from flatout.trials.search import strategy
from flatout.trials.search.space import Choice, space_of
from flatout.trials.short_runs import Setting, ShortRun
from flatout.trials.starts import Starts
from flatout.trials.terms import Goal, Show, Terms
from handmade import FACTS, HEADER, MACHINE, plan, screened, trial

LEVERS = pytorch_levers.registry()
REPLICATE, SHARD = {"ranks": {"division": "2:replicate"}}, {"ranks": {"division": "2:shard"}}


EQUAL = Difference(check="parameters", error=0.0)
OTHER = Difference(check="parameters", error=0.05, rounding=0.001, multiple=19.7, multiple_of="a")


class Runs:
    """Starts whose steps take as long as is said of their levers, and scatter a little."""

    def __init__(self, plain_s=0.010, seconds=(), refused=(), **changes):
        self.plain_s, self.seconds, self.refused, self.changes = plain_s, dict(seconds), refused, changes
        self.wanted = []

    def __call__(self, setting, wanted, number, wait):
        self.wanted.append(wanted)
        found = ShortRun(
            folder=setting.run_folder / f"sample-{number}", num_steps=wanted.num_steps, header=HEADER, losses=(1.0,),
            peak_memory_bytes=10**6 * wanted.num_ranks, step_memory_bytes=10**6 // wanted.num_ranks, took_s=1.0,
        )  # fmt: skip
        if wanted.mode in self.refused:
            return replace(found, problem=ScriptError("cannot be divided", cause="why", hint="one rank"))
        if wanted.num_ranks > 1:
            kinds = {"norms": 0.01, "sum of gradients": 0.2}
            told = Exchanges(
                num=9, least_share=0.2, most_share=0.3, waited_for=0, training_s=1.0, memory_bytes=0, kinds=kinds
            )
            found = replace(found, exchanges=told)
        step_s = self.seconds.get(wanted.mode, self.plain_s) * (1 + 0.002 * (number * 7 % 5))
        return replace(found, step_s=(step_s,) * 20, **self.changes)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts of a script, on runs made by hand."""

    def make(runs, difference=EQUAL):
        monkeypatch.setattr(starts, "take", runs)
        monkeypatch.setattr(trained, "differences", lambda *files: (difference,))
        monkeypatch.setattr(trained, "of_losses", lambda *losses: (Difference(check="losses", error=0.0),))
        setting = Setting(
            script=Script(path="train.py"), registry=LEVERS, run_folder=tmp_path, terms=Terms(), machine=MACHINE
        )
        return Starts(setting, lambda text: None, lambda: None)

    return make


EXTENT = Extent(looks=SCREENING, enough="clear")


# -- what is measured ------------------------------------------------------------------------------------------------


def test_pairs_are_starts_of_one_process_and_on_ranks_in_an_order_drawn_by_lot(started):
    runs = Runs(seconds={"replicate": 0.006})
    one = started(runs)
    pairs = one.measure({"bf16": {}, **REPLICATE}, EXTENT)
    assert pairs.compare().verdict == "faster" and pairs.compare().ratio == pytest.approx(1 / 0.6, rel=0.01)
    plain, nudged, *timed = runs.wanted
    assert plain.keeps and nudged.nudged and not any(w.keeps for w in timed) and len(timed) == 2 * len(pairs.ratios)
    assert all((w.num_ranks, w.levers) == ((2, {"bf16": {}}) if w.mode == "replicate" else (1, {})) for w in timed)
    assert {timed[n].num_ranks for n in range(0, len(timed), 2)} == {1, 2}, "neither always goes first"
    assert pairs.peak_memory_bytes == 2 * 10**6 and pairs.baseline_peak_memory_bytes == 10**6


def test_what_ranks_exchanged_and_what_one_of_them_held_is_said(started):
    one = started(Runs(seconds={"replicate": 0.006}))
    one.judge(REPLICATE, "rounding", "precision")
    told = one.measure(REPLICATE, EXTENT).evidence["ranks"]
    assert "took 20 % of training, most of it sum of gradients" in told and "a rank held" in told


def test_a_script_with_fewer_steps_than_a_timed_start_is_timed_by_all_it_has(started):
    class Short(Runs):
        def __call__(self, setting, wanted, number, wait):
            found = super().__call__(setting, wanted, number, wait)
            return replace(found, num_steps=min(50, wanted.num_steps), ended=not wanted.nudged)

    runs = Short(seconds={"replicate": 0.006})
    assert started(runs).measure(REPLICATE, EXTENT).compare().verdict == "faster"
    assert {w.num_steps for w in runs.wanted[3:]} == {20}, "the first start said that it has no more"


def test_a_script_that_fails_as_one_process_is_an_error_and_one_that_is_too_short_inconclusive(started):
    problem = ScriptError("did not", cause="ValueError: planted", hint="")
    with pytest.raises(ScriptError, match="failed as one process") as caught:
        started(lambda setting, *rest: ShortRun(folder=setting.run_folder, problem=problem)).plain()
    assert caught.value.cause == "ValueError: planted"
    with pytest.raises(Inconclusive, match="too few training steps"):
        started(lambda setting, *rest: ShortRun(folder=setting.run_folder, problem=problem, ended=True)).plain()


# -- is the same trained? --------------------------------------------------------------------------------------------


def test_a_division_that_is_refused_says_why_and_is_started_once(started):
    runs = Runs(refused=("shard",))
    one = started(runs)
    with pytest.raises(CandidateFailed, match="cannot be divided: why"):
        one.judge(SHARD, "rounding", "precision")
    assert one.judge(REPLICATE, "rounding", "precision")[0].verdict == "agrees"
    num = len(runs.wanted)
    assert one.judge(REPLICATE, "rounding", "precision")[0].verdict == "agrees" and len(runs.wanted) == num


def test_what_trains_something_else_disagrees(started):
    judged, _ = started(Runs(), OTHER).judge(REPLICATE, "rounding", "precision")
    assert judged.verdict == "disagrees"


def test_other_random_numbers_need_the_class_statistical(started):
    one = started(Runs(), Difference(check="parameters", error=0.1, random_states_equal=False))
    strict, class_ = one.judge(REPLICATE, "rounding", "precision")
    assert strict.verdict == "disagrees" and "`--accept statistical` admits" in strict.detail
    one = started(Runs(), Difference(check="parameters", error=0.1, random_states_equal=False))
    admitted, class_ = one.judge(REPLICATE, "rounding", "statistical")
    assert (admitted.verdict, class_) == ("agrees", "statistical") and "not compared" in admitted.detail


def test_rounding_that_grows_to_chaos_tells_nothing():
    wild = Difference(check="parameters", error=0.1, rounding=0.3, multiple=0.5)
    judged = agreement.judge([Agreement(levers={}, differences=(wild,))], "rounding", ("parameters",))
    assert judged.verdict == "inconclusive" and "rounding alone moves parameters by: 0.3" in judged.detail


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"error": 0.05, "rounding": 0.023, "multiple": 19.7}, "agrees"),  # a small ResNet on two ranks
        ({"error": 0.05, "rounding": 0.001, "multiple": 19.7}, "disagrees"),
        ({"error": 0.001, "rounding": 0.00001, "multiple": 100.0}, "disagrees"),
        ({"error": 0.05, "rounding": 0.023, "multiple": 2.0, "slope": 0.95}, "disagrees"),
        ({"error": 0.01, "multiple": 2.0}, "inconclusive"),
    ],
)
def test_runs_are_believed_to_differ_by_rounding_up_to_what_it_was_seen_to_do(changes, verdict):
    found = Difference(check="parameters", multiple_of="a", **changes)
    assert agreement.judge([Agreement(levers={}, differences=(found,))], "rounding", ("parameters",)).verdict == verdict


# -- a trial of ranks is a trial -------------------------------------------------------------------------------------


def test_ranks_are_tried_like_any_lever_and_judged_before_they_are_timed(started, tmp_path):
    conduct = Conduct(Script(path="train.py"), tmp_path, MACHINE, Goal(choice=Choice(num_ranks=2)), Show())
    runs = Runs(seconds={"replicate": 0.006, "shard": 0.030}, refused=("tensor",))
    conduct.starts = started(runs)
    found = conduct.try_out(Candidate(levers={"bf16": {}, **REPLICATE}))
    assert found.is_won and found.class_ == "precision" and found.label == "bf16 ranks=2:replicate"
    assert found.num_pairs == stats.MIN_PAIRS, "what is chosen is measured again"
    slow = conduct.try_out(Candidate(levers=SHARD))
    assert slow.num_pairs == 2 and "not pursued" in slow.reason and slow.agreement == "agrees"
    refused = conduct.try_out(Candidate(levers={"ranks": {"division": "2:tensor"}}))
    assert refused.outcome == "failed" and refused.reason == "cannot be divided: why"


def test_all_ranks_and_halves_are_tried_in_every_mode_that_is_something_of_its_own():
    found = [division(one) for one in divisions(8)]
    assert {num for num, _ in found} == {8, 4, 2} and {num for num, _ in map(division, divisions(6))} == {6, 3}
    four = [division(one) for one in divisions(4)]
    assert (2, "hybrid") not in four and (4, "hybrid") in four and all(mode != "auto" for _, mode in four)
    assert (4, "tensor") in four and (2, "tensor") in four
    assert (4, "replicate+pipeline") in four and (2, "replicate+pipeline") not in four


NAMES = ("threads", "fused_optimizer", "ranks", "bf16_gradients")


def space(facts=FACTS, num_ranks=2, only=NAMES):
    found = Diagnosis(binding="compute", sentence="", evidence=(), bounds=())
    return space_of(LEVERS, facts, MACHINE, found, Choice(only=only, num_ranks=num_ranks))


def played(seconds, **changes):
    """The search played to its end: each division and each lever is as fast as `seconds` says, multiplied."""
    asked = space(**changes)

    def speed(levers):
        return math.prod(seconds.get(word, 1.0) for word in label(levers).split())

    trials = list(screened(asked, speed)[0].trials)
    while (candidate := strategy.next_candidate(asked, trials)) is not None and len(trials) < 60:
        ratio = speed(candidate.levers)
        trials.append(trial(candidate.levers, ratio, "faster" if ratio > 1 else "slower", ratio_low=0.98 * ratio))
    return trials


def test_every_division_is_tried_on_top_of_the_best_without_what_has_no_place_there():
    trials = played({"fused_optimizer": 1.5, "threads=1": 1.3, "ranks=2:replicate": 1.6, "ranks=2:shard": 1.8})
    on_ranks_ = [t for t in trials if ranks_of(t.levers, LEVERS)]
    assert {t.levers["ranks"]["division"] for t in on_ranks_} == set(divisions(2))
    assert all("threads" not in t.levers for t in on_ranks_), "ranks share the cores"
    assert strategy.best_of(trials).label == "fused_optimizer ranks=2:replicate"
    assert all("fused_optimizer" not in t.levers for t in on_ranks_ if t.levers["ranks"] == SHARD["ranks"])


def test_levers_of_communication_are_tried_where_ranks_win_and_nowhere_else():
    assert not [t for t in played({"ranks=2:replicate": 0.6}) if "bf16_gradients" in t.levers]
    tried = [t for t in played({"ranks=2:replicate": 1.6}) if "bf16_gradients" in t.levers]
    assert tried and all(t.levers["ranks"] == {"division": "2:replicate"} for t in tried)


def test_without_ranks_to_try_nothing_of_theirs_is():
    assert all("ranks" not in c.levers and "bf16_gradients" not in c.levers for c in space(num_ranks=None).singles)
    told = {one.lever: one.reason for one in space(num_ranks=None).untried}
    assert told["ranks"] == told["bf16_gradients"] == "for several ranks: `--ranks N` tries it"


@pytest.mark.parametrize(("num", "accept"), [(1, "precision"), (0, "precision"), (2, "exact")])
def test_what_cannot_be_tuned_for_ranks_is_said_before_anything_runs(num, accept):
    with pytest.raises(UsageError):
        tune._for_ranks(Goal(choice=Choice(num_ranks=num, accept=accept)), {}, MACHINE, Show())


def test_ranks_are_sought_beside_the_plan_that_is_there(monkeypatch):
    monkeypatch.setattr(tune.isolation, "require", lambda: None)
    goal = tune._for_ranks(Goal(choice=Choice(num_ranks=2)), plan().levers, MACHINE, Show())
    assert {*plan().levers, "ranks", "bf16_gradients"} == {*goal.choice.only}
    assert goal.budget_s == tune.RANKS_BUDGET_S and tune._options(goal.choice, None).count("--ranks 2") == 1
    goal = tune._for_ranks(Goal(choice=Choice(num_ranks=2, only=("bf16",)), budget_s=9.0), {}, MACHINE, Show())
    assert goal.choice.only[0] == "bf16" and "ranks" in goal.choice.only and goal.budget_s == 9.0


# -- the run ---------------------------------------------------------------------------------------------------------


PLANNED = Engagement(levers={"threads": {"num": 1}, "ranks": {"division": "4:shard"}}, plan=plan(), line="from a plan")


def decided(asked, chosen, named=None):
    said = []
    return on_ranks.decided(asked, chosen, LEVERS, named, 9.0, said.append), said


def test_a_run_goes_on_the_ranks_of_its_plan():
    terms, said = decided(None, PLANNED)
    assert (terms.num_ranks, terms.mode, terms.hang_timeout_s) == (4, "shard", 9.0)
    assert said == ["4 ranks, shard, as the plan says"]
    assert decided(None, Engagement())[0] is None


def test_the_mode_is_the_plans_where_none_was_typed():
    assert decided(RankTerms(num_ranks=4), PLANNED)[0].mode == "shard"
    assert decided(RankTerms(num_ranks=4, mode="replicate"), PLANNED)[0].mode == "replicate"


@pytest.mark.parametrize("num", [1, 2, 8])
def test_a_named_plan_for_other_ranks_is_an_error_and_one_found_by_default_gives_way(num):
    with pytest.raises(RecordError, match=r"`plan\.toml` is for 4 ranks, not for") as caught:
        decided(RankTerms(num_ranks=num), PLANNED, Path("plan.toml"))
    assert caught.value.cause and caught.value.hint
    terms, said = decided(RankTerms(num_ranks=num), PLANNED)
    assert (terms is None) == (num == 1) and "the plan is for 4" in said[0]


def test_what_has_no_place_on_ranks_is_left_out_and_said_and_what_was_named_stays():
    found = choice.for_ranks(PLANNED, "4:shard", LEVERS)
    assert not found.levers and found.line == "from a plan; without threads: ranks share the cores"
    assert choice.for_ranks(PLANNED, "4:shard", LEVERS, named=True).levers == {"threads": {"num": 1}}
    alone = choice.for_one_process(Engagement(levers={"bf16_gradients": {}, **REPLICATE}), LEVERS)
    assert not alone.levers and "without bf16_gradients: one process sends no gradients" in alone.line
    assert of_one_process({"bf16": {}, "bf16_gradients": {}, **REPLICATE}, LEVERS) == {"bf16": {}}


def test_ranks_may_be_named_as_a_lever():
    assert choice.parse_levers(("ranks=2:shard",), LEVERS, lambda: MACHINE) == SHARD
    with pytest.raises(UsageError):
        choice.parse_levers(("ranks=two",), LEVERS, lambda: MACHINE)
