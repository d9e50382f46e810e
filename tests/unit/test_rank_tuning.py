"""What does a tuning for ranks come to? With runs made by hand: what is tried, compared, timed, chosen and said."""

from dataclasses import replace
from pathlib import Path

import pytest

from flatout.cli.showing import show_ranks
from flatout.errors import Inconclusive, RecordError, ScriptError, UsageError
from flatout.frameworks.pytorch import levers as pytorch_levers
from flatout.frameworks.pytorch.numerics import trained
from flatout.judge import agreement, rank_tuning
from flatout.judge.rank_tuning import RankTrial, best_of, candidates, summary_of, verdict
from flatout.records import plan_file
from flatout.records.difference import Difference
from flatout.records.plan import label
from flatout.records.ranks import SUM_OF_GRADIENTS
from flatout.records.ranks import Terms as RankTerms
from flatout.records.ranks_of_plan import PlanRanks
from flatout.records.trace import Agreement
from flatout.report import ranks as report
from flatout.report import screen
from flatout.run import on_ranks
from flatout.run.choice import Engagement
from flatout.run.rank_watch import Exchanges
from flatout.run.script import Script
from flatout.trials import rank_conduct, rank_tuner
from flatout.trials.conduct import Goal, Show
from flatout.trials.rank_conduct import RankConduct
from flatout.trials.samples_of_runs import Sample, Setting
from flatout.trials.search.space import Choice
from flatout.trials.terms import Terms
from handmade import FACTS, HEADER, MACHINE, MODEL, plan

LEVERS = pytorch_levers.registry()
WITHOUT = {name: lever for name, lever in LEVERS.items() if not lever.modes}
"""Levers but those of communication."""

RANKS = PlanRanks(
    num=4, mode="shard", ratio=1.6, ratio_low=1.5, ratio_high=1.7, num_pairs=4, agreement="rounding: loss error 0",
    created="2026-11-21T10:46:07+00:00", run=".flatout/train-2",
)  # fmt: skip


REPLICATED = replace(
    FACTS, num_ranks=2, rank_mode="replicate", models=(replace(MODEL, parameter_bytes=4 << 20, dtypes=("float32",)),)
)
EXCHANGES = Exchanges(num=9, least_share=0.3, most_share=0.3, waited_for=0, training_s=1.0, memory_bytes=0)


def trial(num=2, mode="replicate", ratio=1.5, outcome="faster", **changes):
    fields = dict(
        num_ranks=num, mode=mode, outcome=outcome, ratio=ratio, ratio_low=ratio * 0.98, ratio_high=ratio * 1.02,
        num_pairs=4, step_s=0.01 / ratio, agreement="agrees", agreement_detail="loss error 0",
    )  # fmt: skip
    return RankTrial(**{**fields, **changes})


class Runs:
    """Runs of a script whose steps take as long as is said, and scatter a little."""

    def __init__(self, step_s, **problems):
        self.step_s, self.problems, self.wanted = step_s, problems, []

    def __call__(self, setting, wanted, number, wait):
        self.wanted.append(wanted)
        who = (wanted.num_ranks, wanted.mode) if wanted.num_ranks > 1 else 1
        if communication := [name for name in wanted.levers if LEVERS[name].modes]:
            who = (*who, label({name: wanted.levers[name] for name in communication}))
        found = Sample(folder=setting.run_folder / f"sample-{number}", num_steps=wanted.num_steps, header=HEADER,
                       losses=(1.0,), peak_memory_bytes=10**6 * wanted.num_ranks)  # fmt: skip
        if who in self.problems.get("refused", ()):
            return replace(found, problem=ScriptError("cannot be divided", cause="why", hint="one rank"), refused=True)
        if isinstance(self.step_s.get(who), BaseException):
            raise self.step_s[who]
        if wanted.num_ranks > 1 and "sums" in self.problems:
            share = self.problems["sums"]
            found = replace(found, facts=REPLICATED, exchanges=replace(EXCHANGES, kinds={SUM_OF_GRADIENTS: share}))
        scatter = 1 + (0.02 if who in self.problems.get("noisy", ()) else 0.002) * (number * 7 % 5)
        return replace(found, step_s=(self.step_s[who] * scatter,) * 20)


@pytest.fixture
def two_modes(monkeypatch):
    """Runs made by hand are those of two modes; which there are to be tried has a test of its own."""
    monkeypatch.setattr(rank_tuning, "candidates", lambda num: [(num, "replicate"), (num, "shard")])


@pytest.fixture
def tuned(tmp_path, monkeypatch, two_modes):
    """A conduct from start to end, on runs made by hand."""
    monkeypatch.chdir(tmp_path)
    equal = (Difference(check="parameters", error=0.0),)

    def run(runs, num_ranks=2, differences=equal, accept="precision", levers=None, registry=None, **changes):
        monkeypatch.setattr(rank_conduct, "take", runs)
        monkeypatch.setattr(trained, "differences", lambda *files: differences)
        monkeypatch.setattr(trained, "of_losses", lambda *losses: (Difference(check="losses", error=0.0),))
        setting = Setting(
            script=Script(path="train.py"),
            registry=registry or WITHOUT,
            run_folder=tmp_path,
            terms=Terms(),
            machine=MACHINE,
        )
        chosen = Engagement(levers=levers or {})
        return RankConduct(
            setting, chosen, num_ranks, **{"budget_s": None, "accept": accept, "show": Show(), **changes}
        ).run()

    return run


def text(found, **changes):
    return " ".join(screen.plain(report.ranks(found, **changes), width=100).split())


# -- what is tried ---------------------------------------------------------------------------------------------------


def test_all_ranks_and_halves_are_tried_in_every_mode_that_is_something_of_its_own():
    assert {num for num, _ in candidates(8)} == {8, 4, 2}
    assert {num for num, _ in candidates(6)} == {6, 3}
    assert (2, "hybrid") not in candidates(4) and (4, "hybrid") in candidates(4)
    assert all(mode != "auto" for _, mode in candidates(4))
    assert (4, "tensor") in candidates(4) and (2, "tensor") in candidates(4)
    assert (4, "replicate+pipeline") in candidates(4) and (2, "replicate+pipeline") not in candidates(4)


# -- what is chosen --------------------------------------------------------------------------------------------------


def test_the_fastest_that_agrees_is_chosen_and_more_ranks_have_to_earn_their_number():
    assert best_of([trial(2), trial(4, ratio=1.505)]).num_ranks == 2
    assert best_of([trial(2), trial(4, ratio=2.5)]).num_ranks == 4
    assert best_of([trial(2, ratio=3.0, outcome="disagrees", agreement="disagrees"), trial(4)]).num_ranks == 4
    assert best_of([trial(outcome="inconclusive")]) is None


def test_one_rank_is_faster_only_where_every_division_surely_is_slower():
    slow = trial(ratio=0.5, outcome="slower")
    refused = RankTrial(num_ranks=4, mode="shard", outcome="refused")
    assert verdict([slow, refused]) == "one rank is faster"
    assert verdict([slow, trial(ratio=0.9, outcome="inconclusive")]) == "inconclusive"
    assert verdict([slow, trial(ratio=1.0, outcome="no difference")]) == "no difference"
    assert verdict([refused]) == "not divided"
    assert verdict([replace(refused, outcome="inconclusive", agreement="inconclusive")]) == "inconclusive"


# -- from start to end -----------------------------------------------------------------------------------------------


def test_ranks_that_win_are_found_with_their_figures(tuned):
    runs = Runs({1: 0.010, (2, "replicate"): 0.006, (2, "shard"): 0.008})
    found = tuned(runs)
    assert found.verdict == "faster" and (found.winner.num_ranks, found.winner.mode) == (2, "replicate")
    assert found.winner.ratio == pytest.approx(10 / 6, rel=0.02) and found.winner.num_pairs >= 4
    said = text(found)
    assert "1.7x faster on 2 ranks, replicate: 10" in said and "next flatout run train.py" in said
    assert summary_of(found)["ranks"] == 2 and len(summary_of(found)["trials"]) == 2


def test_what_surely_is_slower_than_what_has_won_is_measured_no_further(tuned):
    runs = Runs({1: 0.010, (2, "replicate"): 0.005, (2, "shard"): 0.0099}, noisy={(2, "shard")})
    found = tuned(runs)
    assert found.trials[1].num_pairs == 4 and found.trials[1].reason == "slower than 2 ranks, replicate: not pursued"


@pytest.mark.parametrize(("replicate_s", "verdict"), [(0.006, "faster"), (0.015, "one rank is faster")])
def test_what_is_hopeless_is_left_after_two_rounds_and_does_not_blur_the_verdict(tuned, replicate_s, verdict):
    found = tuned(Runs({1: 0.010, (2, "replicate"): replicate_s, (2, "shard"): 0.1}))
    assert found.verdict == verdict
    assert found.trials[0].num_pairs >= 4 and found.trials[1].num_pairs == 2
    assert found.trials[1].reason == "2 rounds, in each less than half as fast as one process: not pursued"


def test_of_hopeless_ones_the_best_is_measured_to_the_end(tuned):
    found = tuned(Runs({1: 0.010, (2, "replicate"): 0.05, (2, "shard"): 0.06}))
    assert found.verdict == "one rank is faster" and all(one.num_pairs >= 4 for one in found.trials)


def test_one_rank_is_faster_is_a_finding(tuned):
    found = tuned(Runs({1: 0.010, (2, "replicate"): 0.015, (2, "shard"): 0.03}))
    assert found.verdict == "one rank is faster" and found.winner is None
    assert "one rank is faster: 10" in text(found) and "2 ranks, replicate, the best of them: 0.6" in text(found)
    assert summary_of(found)["ranks"] == 1 and summary_of(found)["mode"] is None


def test_a_refused_division_is_listed_with_its_reason_and_does_not_end_the_tuning(tuned):
    runs = Runs({1: 0.010, (2, "replicate"): 0.006}, refused={(2, "shard")})
    found = tuned(runs)
    refused = found.trials[1]
    assert (refused.outcome, refused.reason, refused.cause, refused.hint) == (
        "refused",
        "cannot be divided",
        "why",
        "one rank",
    )
    assert found.verdict == "faster" and "cannot be divided: why hint: one rank" in text(found)
    assert sum(w.mode == "shard" for w in runs.wanted) == 1, "what is refused is not timed"


def test_what_trains_something_else_is_not_timed_and_never_chosen(tuned):
    runs = Runs({1: 0.010, (2, "replicate"): 0.001, (2, "shard"): 0.001})
    found = tuned(
        runs,
        differences=(
            Difference(check="parameters", error=0.3, rounding=0.001, multiple=900.0, multiple_of="a.weight"),
        ),
    )
    assert found.verdict == "not divided" and {t.outcome for t in found.trials} == {"disagrees"}
    assert "`a.weight` differ by 900 times what rounding moves there" in found.trials[0].agreement_detail
    assert len(runs.wanted) == 4


def test_other_random_numbers_need_the_class_statistical(tuned):
    other = (Difference(check="parameters", error=0.5, random_states_equal=False),)
    runs = {1: 0.010, (2, "replicate"): 0.005, (2, "shard"): 0.005}
    strict, admitted = tuned(Runs(runs), differences=other), tuned(Runs(runs), differences=other, accept="statistical")
    assert strict.verdict == "not divided" and "`--accept statistical` admits" in strict.trials[0].agreement_detail
    assert admitted.verdict == "faster" and admitted.winner.class_ == "statistical"
    assert "not compared: random generators end elsewhere" in text(admitted)


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


def test_a_script_that_fails_as_one_process_is_an_error_and_one_that_is_too_short_inconclusive(tuned):
    class Failing(Runs):
        def __call__(self, setting, wanted, number, wait):
            problem = ScriptError("did not", cause="ValueError: planted", hint="")
            return Sample(folder=setting.run_folder, problem=problem, ended=self.step_s, num_steps=3)

    with pytest.raises(ScriptError, match="failed as one process") as caught:
        tuned(Failing(False))
    assert caught.value.cause == "ValueError: planted"
    with pytest.raises(Inconclusive, match="too few training steps"):
        tuned(Failing(True))


def test_a_script_with_fewer_steps_than_a_timed_run_is_timed_by_all_it_has(tuned):
    class Short(Runs):
        def __call__(self, setting, wanted, number, wait):
            found = super().__call__(setting, wanted, number, wait)
            problem = ScriptError("the script did not make 210 steps", cause="it ended after 50 steps", hint="")
            return found if wanted.keeps else replace(found, num_steps=50, ended=True, problem=problem)

    found = tuned(Short({1: 0.010, (2, "replicate"): 0.006, (2, "shard"): 0.006}))
    assert found.verdict == "faster" and found.num_steps == 50 and "runs of 50 steps" in text(found)


def test_ctrl_c_keeps_what_was_timed(tuned):
    class Stopped(Runs):
        def __call__(self, *args):
            if len(self.wanted) == 4 + 3 * 2:
                raise KeyboardInterrupt
            return super().__call__(*args)

    found = tuned(Stopped({1: 0.010, (2, "replicate"): 0.0099, (2, "shard"): 0.0101}))
    assert found.stopped == "you stopped it" and found.trials[0].num_pairs == 2
    assert (
        found.verdict == "inconclusive" and found.trials[0].reason == "2 of at least 4 pairs of windows that are needed"
    )


def test_timed_runs_have_the_levers_of_the_plan_and_compared_ones_none(tuned):
    runs = Runs({1: 0.010, (2, "replicate"): 0.005, (2, "shard"): 0.005})
    tuned(runs, levers={"bf16": {}, "threads": {"num": 2}})
    compared = [w for w in runs.wanted if w.keeps]
    timed = [w for w in runs.wanted if not w.keeps]
    assert len(compared) == 4 and all(not w.levers for w in compared)
    assert all(set(w.levers) == ({"bf16", "threads"} if w.num_ranks == 1 else {"bf16"}) for w in timed)


def test_memory_within_a_step_and_each_kind_of_exchange_are_kept(tuned):
    class Exchanging(Runs):
        def __call__(self, setting, wanted, number, wait):
            found = super().__call__(setting, wanted, number, wait)
            if wanted.keeps:
                return replace(found, step_memory_bytes=10**6 if wanted.num_ranks == 1 else 750_000)
            kinds = {"parameters": 0.2, "rules": 0.01 * (number % 2), "gradients": 0.3}
            return replace(found, exchanges=exchanges(kinds)) if wanted.num_ranks > 1 else found

    found = tuned(Exchanging({1: 0.010, (2, "replicate"): 0.006, (2, "shard"): 0.008}))
    assert found.step_memory_bytes == 10**6 and found.memory_fraction(found.trials[0]) == 0.75
    assert list(found.trials[0].exchange_shares)[:2] == ["gradients", "parameters"], "the costliest first"
    assert summary_of(found)["trials"][0]["exchange_shares"]["gradients"] == 0.3
    assert "exchanges: gradients 30 %, parameters 20 %" in text(found, verbose=True)
    assert "gradients 30 %" in screen.plain(report.ranks(found), width=120)
    assert "gradients 30 %" not in screen.plain(report.ranks(found), width=80), "there it has no room"


def exchanges(kinds):
    return Exchanges(num=9, least_share=0.5, most_share=0.6, waited_for=0, training_s=1.0, kinds=kinds)


def test_its_page_is_in_the_run_folder_or_where_it_was_asked_for(tuned, tmp_path, capsys):
    found = tuned(Runs({1: 0.010, (2, "replicate"): 0.006, (2, "shard"): 0.008}))
    show_ranks(found, as_json=False)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert "report     report.html" in capsys.readouterr().out
    show_ranks(found, html=tmp_path / "page.html", as_json=True)
    assert (tmp_path / "page.html").exists() and capsys.readouterr().out.startswith("{")
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(UsageError):
        show_ranks(found, html=tmp_path / "notes.html", as_json=False)
    assert (tmp_path / "notes.html").read_text() == "mine"


def test_a_tuning_survives_its_file(tuned, tmp_path):
    found = tuned(Runs({1: 0.010, (2, "replicate"): 0.006, (2, "shard"): 0.008}))
    rank_tuning.save(found, tmp_path)
    assert rank_tuning.load(tmp_path) == found
    with pytest.raises(RecordError, match="no tuning of ranks"):
        rank_tuning.load(tmp_path / "elsewhere")


# -- levers of communication -----------------------------------------------------------------------------------------

SENT = {
    1: 0.010, (2, "replicate"): 0.006, (2, "shard"): 0.008, (2, "replicate", "gradient_buckets=0"): 0.005,
    (2, "replicate", "gradient_buckets=1"): 0.0061, (2, "replicate", "gradient_buckets=0 bf16_gradients"): 0.0045,
    (2, "replicate", "bf16_gradients"): 0.0055,
}  # fmt: skip


def searched(tuned, step_s=SENT, **changes):
    budget = {"budget_s": 600.0, "registry": LEVERS}
    runs = Runs({**SENT, **step_s}, sums=changes.pop("sums", 0.2))
    return tuned(runs, **{**budget, **changes}), runs


def test_levers_that_win_beside_the_best_division_are_kept_and_built_on(tuned):
    found, runs = searched(tuned)
    assert found.winner.levers == {"gradient_buckets": {"mb": 0}, "bf16_gradients": {}}
    assert found.winner.class_ == "precision" and found.winner.gain == pytest.approx(10 / 9, rel=0.02)
    assert [t.label for t in found.trials[2:]] == [
        "2 ranks, replicate, gradient_buckets=0",
        "2 ranks, replicate, gradient_buckets=1",
        "2 ranks, replicate, gradient_buckets=0 bf16_gradients",
    ]
    assert found.trials[3].outcome == "slower" and "beside 2 ranks, replicate: not kept" in found.trials[3].reason
    compared = [w.levers for w in runs.wanted if w.keeps and w.levers]
    assert compared == [t.levers for t in found.trials[2:]], "what they train is compared"
    said = text(found)
    assert "gradient_buckets=0 ✔" in said and "on 2 ranks, replicate, gradient_buckets=0 bf16_gradients: " in said
    told = summary_of(found)
    assert told["communication"] == {"gradient_buckets": {"mb": 0}, "bf16_gradients": {}}
    assert told["trials"][3]["levers"] == {"gradient_buckets": {"mb": 1}} and told["trials"][3]["gain"] < 1


def test_bf16_is_not_tried_where_its_class_is_not_admitted(tuned):
    found, runs = searched(tuned, accept="rounding")
    assert found.winner.levers == {"gradient_buckets": {"mb": 0}} and found.winner.class_ == "rounding"
    assert not any("bf16_gradients" in w.levers for w in runs.wanted)
    assert any("`bf16_gradients` was not tried" in one and "--accept precision" in one for one in found.remarks)


def test_levers_that_win_nothing_leave_the_division_as_it_was(tuned):
    no_gain = dict.fromkeys((who for who in SENT if who != 1 and len(who) == 3), 0.00601)
    found, _ = searched(tuned, no_gain)
    assert found.winner is found.trials[0] and not found.winner.levers
    assert {t.outcome for t in found.trials[2:]} <= {"no difference", "slower", "inconclusive"}


def test_where_sums_take_little_nothing_is_tried_and_that_is_said(tuned):
    found, runs = searched(tuned, sums=0.012)
    assert len(found.trials) == 2 and not any(w.levers for w in runs.wanted)
    assert "sums of gradients take 1.2 % of the time there that nothing hides: nothing to gain" in found.remarks[0]
    hopeless, _ = searched(tuned, {(2, "replicate"): 0.015, (2, "shard"): 0.02})
    assert hopeless.verdict == "one rank is faster" and "even if sums of gradients took no time" in hopeless.remarks[0]


def test_a_division_that_is_slower_may_win_by_a_lever(tuned):
    faster = {(2, "replicate"): 0.0105, (2, "shard"): 0.02, (2, "replicate", "gradient_buckets=0"): 0.008}
    slower = {
        (2, "replicate", "gradient_buckets=1"): 0.0106,
        (2, "replicate", "gradient_buckets=0 bf16_gradients"): 0.0085,
    }
    found, _ = searched(tuned, faster | slower)
    assert found.verdict == "faster" and found.winner.levers == {"gradient_buckets": {"mb": 0}}


def test_they_are_not_begun_where_the_budget_would_not_last(tuned, monkeypatch):
    found, runs = searched(tuned, budget_s=1e-6)
    assert len(found.trials) == 2 and "the budget is nearly spent" in found.remarks[0]
    assert not any(w.levers for w in runs.wanted)


def test_a_lever_that_trains_something_else_is_not_timed(tuned, monkeypatch):
    coarse = Difference(check="parameters", error=0.03, rounding=0.001, multiple=900.0, multiple_of="a.weight")
    judge = [Agreement(levers={}, differences=(coarse,))]
    assert agreement.judge(judge, "precision", ("parameters",)).verdict == "agrees"
    assert agreement.judge(judge, "rounding", ("parameters",)).verdict == "disagrees"
    for wrong in (replace(coarse, error=0.08), replace(coarse, slope=0.95)):
        judge = [Agreement(levers={}, differences=(wrong,))]
        assert agreement.judge(judge, "precision", ("parameters",)).verdict == "disagrees"


def test_what_was_stopped_before_it_was_timed_is_not_chosen():
    kept = trial(levers={"bf16_gradients": {}}, outcome="inconclusive", ratio=2.0)
    assert best_of([trial(), kept]).levers == {}
    assert best_of([trial(), replace(kept, outcome="faster", gain=1.1)]).levers == {"bf16_gradients": {}}
    assert best_of([trial(4, ratio=3.0), replace(kept, outcome="faster", gain=1.1)]).num_ranks == 4


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path, monkeypatch, tuned):
    """`rank_tuner.tuned` on runs made by hand."""
    Path("train.py").write_text("import torch\n")
    monkeypatch.setattr(rank_tuner, "read_machine", lambda: MACHINE)
    monkeypatch.setattr(rank_tuner, "version_of", lambda *words: "2.13.0")
    monkeypatch.setattr(rank_tuner.platform, "python_version", lambda: "3.11.7")
    monkeypatch.setattr(rank_tuner.isolation, "require", lambda: None)

    def run(runs, num_ranks=2, budget_s=None, **changes):
        monkeypatch.setattr(rank_conduct, "take", runs)
        monkeypatch.setattr(trained, "differences", lambda *files: (Difference(check="parameters", error=0.0),))
        monkeypatch.setattr(trained, "of_losses", lambda *losses: (Difference(check="losses", error=0.0),))
        goal = Goal(choice=Choice(**changes), budget_s=budget_s)
        return rank_tuner.tuned(Script(path="train.py"), num_ranks, goal, None, Show())

    return run


WINS = {1: 0.010, (2, "replicate"): 0.006, (2, "shard"): 0.008}


def test_levers_of_communication_go_into_the_plan_and_leave_it_with_its_ranks(planned):
    path = Path("flatout.toml")
    plan_file.write(plan(levers={**plan().levers, "bf16_gradients": {}}, ranks=RANKS), path)
    found = planned(Runs(SENT, sums=0.2), budget_s=600.0)
    assert plan_file.read(path, "train.py").levers == {**plan().levers, **found.winner.levers}
    assert found.winner.levers and "bf16_gradients" not in found.levers, "all is measured beside none of them"
    planned(Runs(LOSES))
    assert plan_file.read(path, "train.py") == plan(ranks=None)


LOSES = {1: 0.010, (2, "replicate"): 0.016, (2, "shard"): 0.018}


def test_the_winner_goes_into_the_plan_beside_the_levers_that_are_there(planned):
    path = Path("flatout.toml")
    plan_file.write(plan(), path)
    found = planned(Runs(WINS))
    kept = plan_file.read(path, "train.py")
    assert kept.levers == plan().levers and kept.ratio == 1.5 and kept.class_ == "precision"
    assert (kept.ranks.num, kept.ranks.mode, kept.ranks.ratio) == (
        2,
        "replicate",
        pytest.approx(found.winner.ratio, rel=1e-4),
    )
    assert "# 2 ranks, replicate: 1.6" in path.read_text() and "# bf16 threads=1: 1.50x" in path.read_text()


def test_without_a_plan_there_is_one_that_has_ranks_alone(planned):
    planned(Runs(WINS))
    kept = plan_file.read(Path("flatout.toml"), "train.py")
    assert kept.levers == {} and kept.ratio == 1.0 and kept.ranks.num == 2 and kept.class_ == "rounding"


def test_where_one_rank_is_faster_the_plan_has_no_ranks(planned):
    path = Path("flatout.toml")
    found = planned(Runs(LOSES))
    assert found.plan_path is None and not path.exists()
    plan_file.write(plan(ranks=RANKS), path)
    found = planned(Runs(LOSES))
    assert found.plan_path == "flatout.toml" and plan_file.read(path, "train.py") == plan(ranks=None)


def test_what_cannot_be_tuned_for_ranks_is_said_before_anything_runs(planned):
    for num, changes in ((1, {}), (2, {"only": ("bf16",)}), (2, {"without": ("bf16",)}), (2, {"accept": "exact"})):
        with pytest.raises(UsageError):
            planned(Runs({}), num, **changes)
    assert not list(Path().glob(".flatout/train-*"))


def test_a_folder_in_which_nothing_was_found_goes(planned):
    with pytest.raises(KeyboardInterrupt):
        planned(Runs({1: KeyboardInterrupt()}))
    assert not list(Path().glob(".flatout/train-*"))


def test_a_plan_with_ranks_survives_its_file_and_a_torn_one_is_an_error(tuned):
    path = Path("flatout.toml")
    plan_file.write(plan(ranks=RANKS), path)
    assert plan_file.read(path, "train.py") == plan(ranks=RANKS)
    for wrong, what in (
        ("num = 4", "num = 1"),
        ('mode = "shard"', 'mode = "other"'),
        ("ratio = 1.6\n", "ratio = 0.0\n"),
    ):
        path.write_text(path.read_text().replace(wrong, what))
        with pytest.raises(RecordError, match="torn"):
            plan_file.read(path, "train.py")
        plan_file.write(plan(ranks=RANKS), Path("new.toml"))
        path = Path("new.toml").rename(path)


# -- the run ---------------------------------------------------------------------------------------------------------


def decided(asked, found, named=None):
    said = []
    return on_ranks.decided(asked, found, named, 9.0, said.append), said


def test_a_run_goes_on_the_ranks_of_its_plan():
    terms, said = decided(None, plan(ranks=RANKS))
    assert (terms.num_ranks, terms.mode, terms.hang_timeout_s) == (4, "shard", 9.0)
    assert said == ["4 ranks, shard, as the plan says: 1.6x expected of them"]
    assert decided(None, plan())[0] is None and decided(None, None)[0] is None


def test_the_mode_is_the_plans_where_none_was_typed():
    assert decided(RankTerms(num_ranks=4), plan(ranks=RANKS))[0].mode == "shard"
    assert decided(RankTerms(num_ranks=4, mode="replicate"), plan(ranks=RANKS))[0].mode == "replicate"


@pytest.mark.parametrize("num", [1, 2, 8])
def test_a_named_plan_for_other_ranks_is_an_error_and_one_found_by_default_gives_way(num):
    with pytest.raises(RecordError, match=r"`plan\.toml` is for 4 ranks, not for") as caught:
        decided(RankTerms(num_ranks=num), plan(ranks=RANKS), Path("plan.toml"))
    assert caught.value.cause and caught.value.hint
    terms, said = decided(RankTerms(num_ranks=num), plan(ranks=RANKS))
    assert (terms is None) == (num == 1) and "the plan is for 4" in said[0]
