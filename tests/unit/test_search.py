"""The search over sets of levers, against machines whose true speed is made up."""

import itertools
import math
from dataclasses import replace

import pytest

from flatout.frameworks.pytorch.levers import registry as registry_of_levers
from flatout.judge.diagnosis import Bound, Diagnosis
from flatout.records.plan import CLASSES, Candidate, Trial, allows
from flatout.trials.search.space import Choice, Space, begun_with, bound_of, space_of, widest_class
from flatout.trials.search.strategy import best_of, next_candidate, second_to, to_beat, usable
from handmade import FACTS, LOADER, MACHINE, lever, registry, screened, trial

DIAGNOSIS = Diagnosis(binding="compute", sentence="compute", evidence=(), bounds=())


def numbers(*values):
    return lambda self, facts, machine: tuple({"num": value} for value in values)


LEVERS = registry(
    lever("threads", parameter="num", settings=numbers(1, 2), shortens=("forward", "backward", "optimizer")),
    lever("workers", parameter="num", settings=numbers(1, 2), shortens=("data",), class_="exact", check="batches",
          toggles="epoch", partners=("threads",)),
    lever("channels_last", partners=("bf16",)),
    lever("fused_optimizer", shortens=("optimizer",), check="updates", conflicts=("foreach_optimizer",)),
    lever("foreach_optimizer", shortens=("optimizer",), check="updates"),
    lever("bf16", class_="precision"),
    lever("compile", compiles=True),
    lever("affinity", class_="exact", check="none", toggles="process", engage=None, release=None,
          environment=lambda self, settings: {"X": "1"}),
    lever("other_seeds", class_="statistical", check="gradients"),
)  # fmt: skip


def space(levers=LEVERS, *, choice=None, diagnosis=DIAGNOSIS):
    return space_of(levers, FACTS, MACHINE, diagnosis, choice or Choice())


def free_data(ratio, high):
    bound = Bound(remedy="free data", ratio=ratio, low=1.0, high=high, how="measured", shortens=("data",))
    return Diagnosis(binding="input", sentence="input", evidence=(), bounds=(bound,))


def product(**factors):
    """A machine on which levers multiply; `a__b` is what two bring together on top."""

    def speed(levers):
        words = {f"{name}{settings.get('num', '')}" for name, settings in levers.items()}
        ratio = 1.0
        for name, factor in factors.items():
            if set(name.split("__")) <= words:
                ratio *= factor
        return ratio

    return speed


def conducted(where, speed, broken=lambda levers: "", limit=300):
    """All trials that the search asks for, each checked against the rules."""
    trials = list(screened(where, speed, broken)[0].trials)
    while (candidate := next_candidate(where, trials)) is not None:
        assert len(trials) < limit, "it does not end"
        assert candidate.key not in {Candidate(levers=t.levers).key for t in trials}
        assert not any(b in where.levers[a].conflicts for a in candidate.levers for b in candidate.levers)
        outcome = broken(candidate.levers)
        ratio = speed(candidate.levers)
        if outcome:
            trials.append(Trial(levers=candidate.levers, outcome=outcome, ratio=None))
        else:
            agreement = "agrees" if ratio > 1 else ""
            trials.append(trial(candidate.levers, ratio, "faster" if ratio > 1 else "slower", agreement))
    return trials


def true_best(where, speed):
    """By trying everything: the best ratio of any set without a conflict."""
    choices = {}
    for candidate in where.singles:
        for name, settings in candidate.levers.items():
            choices.setdefault(name, [None]).append(settings)
    best = 1.0
    for settings in itertools.product(*choices.values()):
        levers = {n: s for n, s in zip(choices, settings, strict=True) if s is not None}
        if not any(b in where.levers[a].conflicts for a in levers for b in levers):
            best = max(best, speed(levers))
    return best


MODELS = {
    "partners that lose alone": product(bf16=0.8, channels_last=0.95, bf16__channels_last=1.8 / (0.8 * 0.95)),
    "partners that add to others": product(
        workers1=1.6, threads1=1.2, fused_optimizer=1.1, bf16=0.8, channels_last=0.95, bf16__channels_last=1.6
    ),
    "a worker and a thread": product(
        workers1=0.8, threads1=0.8, workers1__threads1=1.3 / 0.64, workers2=0.7, threads2=0.99, bf16=1.1
    ),
    "a lever that loses alone and gains in company": product(workers2=1.5, bf16=0.95, bf16__workers2=1.3),
    "one lever spoils another": product(bf16=1.5, channels_last=1.2, bf16__channels_last=0.7, threads1=1.1),
    "the better of two that exclude each other": product(fused_optimizer=1.1, foreach_optimizer=1.3, bf16=1.2),
    "compiling gains on top": product(bf16=1.3, compile=1.2, affinity=1.1),
    "compiling gains only with bf16": product(bf16=1.2, compile=0.9, bf16__compile=1.6),
    "compiling makes another lever needless": product(bf16=1.3, channels_last=1.2, compile=1.5,
                                                      channels_last__compile=0.75),
    "the better of two settings": product(threads1=1.2, threads2=1.4, workers1=1.1, workers2=1.3),
    "nothing helps": product(threads1=0.9, threads2=0.9, workers1=0.9, workers2=0.9, channels_last=0.9, bf16=0.9,
                             fused_optimizer=0.99, foreach_optimizer=0.99, compile=0.8, affinity=0.99),
    "everything helps": product(threads2=1.1, workers2=1.1, channels_last=1.1, bf16=1.1, fused_optimizer=1.1,
                                compile=1.1, affinity=1.1),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_search_finds_the_best_set_and_ends(name):
    where, speed = space(), MODELS[name]
    trials = conducted(where, speed)
    best = best_of(trials)
    assert (best.ratio if best else 1.0) == pytest.approx(true_best(where, speed), rel=0.011)


def test_the_order_is_what_can_be_switched_then_what_compiles_then_new_processes():
    trials = conducted(space(), MODELS["compiling gains on top"])
    names = [set(t.levers) for t in trials]
    first_compile = next(i for i, n in enumerate(names) if "compile" in n)
    first_process = next(i for i, n in enumerate(names) if "affinity" in n)
    cheap = {frozenset(n) for n in names[:first_compile]}
    assert {frozenset({name}) for name in ("threads", "workers", "channels_last", "bf16", "fused_optimizer")} <= cheap
    assert first_compile < first_process
    assert "bf16" in names[first_compile], "compiled on top of the best"
    assert {"bf16", "compile"} <= names[first_process]


def test_what_compiles_is_tried_alone_where_nothing_else_gains():
    trials = conducted(space(), product(compile=1.4, **{n: 0.9 for n in ("threads1", "threads2", "workers1",
                       "workers2", "channels_last", "bf16", "fused_optimizer", "foreach_optimizer")}))  # fmt: skip
    assert best_of(trials).levers == {"compile": {}}
    assert next(set(t.levers) for t in trials if "compile" in t.levers) == {"compile"}


@pytest.mark.parametrize(("ratio", "engage_s", "kept"), [(1.02, 46.0, False), (1.02, 2.0, True), (1.2, 46.0, True)])
def test_what_takes_long_to_engage_must_earn_that_back(ratio, engage_s, kept):
    alone = best_of([trial({"compile": {}}, ratio, engage_s=engage_s)])
    assert (alone is not None) == kept
    beside = best_of([trial({"bf16": {}}, 1.5), trial({"bf16": {}, "compile": {}}, 1.5 * ratio, engage_s=engage_s)])
    assert ("compile" in beside.levers) == kept


def test_what_compiles_is_tried_alone_where_it_breaks_on_top_of_the_best():
    speed = product(bf16=1.2, compile=1.5)
    trials = conducted(space(), speed, broken=lambda levers: "failed" if {"bf16", "compile"} <= set(levers) else "")
    assert best_of(trials).levers == {"compile": {}}


def process(name, **changes):
    return lever(name, class_="exact", check="none", toggles="process", engage=None, release=None,
                 environment=lambda self, settings: {"X": "1"}, **changes)  # fmt: skip


APART = registry(lever("bf16", class_="precision"), process("heap"), process("huge"), process("bound"),
                 process("other", conflicts=("heap",)))  # fmt: skip


def names_of(trials):
    return [set(t.levers) for t in trials]


def test_levers_that_need_a_process_share_one_and_are_not_pursued_where_that_brings_nothing():
    trials = conducted(space(APART), product(bf16=1.3, heap=0.99))
    assert names_of(trials) == [{"bf16"}, {"bf16", "heap", "huge", "bound"}, {"bf16", "other"}]


def test_a_group_that_wins_is_taken_apart_until_it_holds_what_it_needs():
    trials = conducted(space(APART), product(bf16=1.3, heap=1.2, huge=0.95))
    assert best_of(trials).levers == {"bf16": {}, "heap": {}}
    assert len([t for t in trials if "heap" in t.levers]) <= 5, "each is two starts of the script for every pair"


def test_a_group_that_costs_something_is_taken_apart_for_what_else_is_in_it():
    trials = conducted(space(APART), product(bf16=1.3, heap=1.2, bound=0.6))
    assert best_of(trials).levers == {"bf16": {}, "heap": {}}


def test_of_a_group_that_breaks_each_lever_is_tried():
    trials = conducted(space(APART), product(heap=1.2, bound=1.1), lambda levers: "failed" if "huge" in levers else "")
    assert best_of(trials).levers == {"heap": {}, "bound": {}}


def test_a_lever_that_costs_the_best_another_one_is_no_company():
    levers = registry(lever("workers"), process("heap"), process("bound", conflicts=("workers",)))
    trials = conducted(space(levers), product(workers=1.5, heap=1.1))
    assert names_of(trials)[1:3] == [{"workers", "heap"}, {"heap", "bound"}]
    assert best_of(trials).levers == {"workers": {}, "heap": {}}


def test_what_is_to_be_beaten_is_the_best_so_far():
    assert to_beat([]) == 1.0
    assert to_beat([trial({"bf16": {}}, 1.5, ratio_low=1.4)]) == 1.4
    assert to_beat([trial({"bf16": {}}, 1.1, ratio_low=0.9)]) == 1.0


WORDS = registry(
    lever("bf16", class_="precision"),
    lever("compile", compiles=True, parameter="mode", optional=True, choices=("blocks", "finest"),
          settings=lambda self, facts, machine: ({}, {"mode": "blocks"}, {"mode": "finest"}),
          worth_after=registry_of_levers()["compile"].worth_after.__func__),
)  # fmt: skip


def test_another_word_of_a_costly_lever_is_tried_only_where_the_former_broke():
    def words_of(trials):
        return list(dict.fromkeys(t.levers["compile"].get("mode", "") for t in trials if "compile" in t.levers))

    assert words_of(conducted(space(WORDS), product(bf16=1.2, compile=0.9))) == [""]
    assert words_of(conducted(space(WORDS), product(bf16=1.2, compile=1.1))) == [""]
    broken = conducted(
        space(WORDS), product(compile=1.5), broken=lambda levers: "failed" if levers.get("compile") == {} else ""
    )
    assert words_of(broken) == ["", "blocks"] and best_of(broken).levers == {"compile": {"mode": "blocks"}}
    all_broken = conducted(space(WORDS), product(), broken=lambda levers: "failed" if "compile" in levers else "")
    assert words_of(all_broken) == ["", "blocks", "finest"]


def test_a_word_that_refines_another_takes_its_place_in_the_best_where_that_won():
    words = lever("compile", compiles=True, parameter="mode", optional=True, choices=("max-autotune",),
                  settings=lambda self, facts, machine: ({}, {"mode": "max-autotune"}),
                  worth_after=registry_of_levers()["compile"].worth_after.__func__)  # fmt: skip
    levers = registry(lever("bf16", class_="precision"), words)

    def speed(levers):
        mode = levers.get("compile", {}).get("mode", "")
        return (1.2 if "bf16" in levers else 1) * (1.3 if "compile" in levers else 1) * (1.1 if mode else 1)

    trials = conducted(space(levers), speed)
    assert next(t.levers for t in trials if t.levers.get("compile")) == {
        "bf16": {},
        "compile": {"mode": "max-autotune"},
    }
    assert best_of(trials).levers == {"bf16": {}, "compile": {"mode": "max-autotune"}}
    assert not any("compile" in t.levers and t.levers["compile"] for t in conducted(space(levers), lambda levers: 0.9))


def test_a_set_that_contains_a_broken_one_is_never_proposed():
    def broken(levers):
        if levers.get("workers") == {"num": 2}:
            return "disagrees"
        return "failed" if "channels_last" in levers else ""

    trials = conducted(space(), product(workers1=1.3, workers2=3.0, channels_last=2.0, bf16=1.1), broken)
    assert [t.levers for t in trials if t.outcome == "disagrees"] == [{"workers": {"num": 2}}]
    assert [t.levers for t in trials if t.outcome == "failed"] == [{"channels_last": {}}]
    assert best_of(trials).levers == {"workers": {"num": 1}, "bf16": {}}


def test_gradients_beyond_rounding_do_not_keep_a_lever_from_company_of_a_wider_class():
    def broken(levers):
        return "disagrees" if "channels_last" in levers and "bf16" not in levers else ""

    trials = conducted(space(), product(channels_last=1.2, bf16=1.5), broken)
    assert best_of(trials).levers == {"channels_last": {}, "bf16": {}}


@pytest.mark.parametrize("outcome", ["failed", "disagrees"])
def test_other_items_and_crashes_are_not_forgiven_in_company(outcome):
    trials = conducted(space(), product(bf16=1.5), lambda levers: outcome if "workers" in levers else "")
    assert all(len(t.levers) == 1 for t in trials if "workers" in t.levers)


def test_a_lever_whose_numbers_could_not_be_judged_is_no_part_of_a_larger_set():
    trials = [trial({"bf16": {}}, 1.5, agreement="inconclusive"), trial({"threads": {"num": 1}}, 1.2)]
    where = space(registry(LEVERS["bf16"], lever("threads", parameter="num", settings=numbers(1))))
    assert next_candidate(where, trials) is None


def test_conflicts_are_seen_from_either_side():
    one = registry(lever("a", conflicts=("b",)), lever("b"))
    other = registry(lever("a"), lever("b", conflicts=("a",)))
    for levers in (one, other):
        trials = conducted(space(levers), product(a=1.2, b=1.3))
        assert [set(t.levers) for t in trials] == [{"a"}, {"b"}]


def test_what_compiles_takes_the_place_of_levers_that_it_excludes():
    levers = registry(lever("a"), lever("b"), lever("graphs", compiles=True, conflicts=("a",)))
    trials = conducted(space(levers), product(a=1.3, b=1.2, graphs=1.6))
    assert best_of(trials).levers == {"b": {}, "graphs": {}}


@pytest.mark.parametrize("accept", ["exact", "rounding", "precision", "statistical", "semantics"])
def test_no_lever_above_the_accepted_class_is_proposed_and_each_is_named(accept):
    where = space(choice=Choice(accept=accept))
    trials = conducted(where, lambda levers: 1.1 ** len(levers))
    assert all(allows(accept, LEVERS[name].class_) for t in trials for name in t.levers)
    above = {name for name, each in LEVERS.items() if not allows(accept, each.class_)}
    assert {u.lever for u in where.untried} == above
    assert all(f"`--accept {LEVERS[u.lever].class_}`" in u.reason for u in where.untried)


@pytest.mark.parametrize("only", [None, ("batches",)])
@pytest.mark.parametrize("accept", CLASSES)
def test_what_changes_the_training_is_never_tried_whatever_is_accepted_for_only_prove_judges_it(accept, only):
    levers = {"batches": lever("batches", class_="semantics", parameter="num")}
    where = space_of(levers, FACTS, MACHINE, DIAGNOSIS, Choice(accept=accept, only=only))
    assert not where.singles
    (left,) = where.untried
    assert left.reason == (
        "changes what is trained: only `prove` judges it (`flatout prove --levers batches=N --accept semantics`)"
    )


def test_a_lever_whose_cause_was_taken_away_for_nothing_is_ruled_out_with_its_bound():
    where = space(diagnosis=free_data(0.99, 1.01))
    reasons = {u.lever: u.reason for u in where.untried}
    assert reasons["workers"] == "ruled out: free data was measured to bring 1.01x at most"
    assert not any("workers" in c.levers for c in where.singles)


def test_a_lever_that_was_named_is_tried_whatever_its_bound():
    where = space(diagnosis=free_data(0.99, 1.01), choice=Choice(only=("workers",)))
    assert [set(c.levers) for c in where.singles] == [{"workers"}, {"workers"}]
    assert {u.reason for u in where.untried if u.lever != "other_seeds"} == {"not among `--levers`"}


def test_levers_that_were_left_out_or_do_not_apply_or_have_nothing_to_set_are_named():
    levers = registry(
        lever("a"),
        lever("b", applies=lambda self, facts, machine: "no convolution"),
        lever("c", parameter="num", settings=numbers()),
        lever("d"),
    )
    where = space(levers, choice=Choice(without=("d",)))
    assert {u.lever: u.reason for u in where.untried} == {
        "b": "no convolution",
        "c": "no other setting than the present one",
        "d": "left out by `--without`",
    }
    assert [set(c.levers) for c in where.singles] == [{"a"}]


def test_a_lever_that_goes_by_name_only_is_tried_only_where_it_was_named():
    levers = registry(lever("a"), lever("b", only_by_name="a killed run loses what it wrote"))
    where = space(levers)
    assert {u.lever: u.reason for u in where.untried} == {
        "b": "only by name (`--levers b`): a killed run loses what it wrote"
    }
    levers["c"] = lever("c", only_by_name="somebody may want it", frees=lambda *_: {"debugging_off": {}})
    levers["d"] = lever("d", only_by_name="somebody may want it", applies=lambda *_: "no such switch is on")
    gain = Bound(remedy="no debug switches", ratio=1.7, low=1.6, high=1.8, how="", shortens=("forward",))
    reasons = {u.lever: u.reason for u in space(levers, diagnosis=replace(DIAGNOSIS, bounds=(gain,))).untried}
    assert reasons["c"] == "only by name (`--levers c`): somebody may want it; measured to bring 1.70x"
    assert reasons["d"] == "no such switch is on"
    named = space(levers, choice=Choice(only=("b",)))
    assert [set(c.levers) for c in named.singles] == [{"b"}]


def test_what_is_not_worth_it_is_not_proposed():
    where = space()
    first = next_candidate(where, [])
    second = next_candidate(where, [], lambda candidate: candidate.key != first.key)
    assert second is not None and second.key != first.key
    assert next_candidate(where, [], lambda candidate: False) is None


def test_every_lever_is_either_proposed_or_named():
    where = space()
    assert {n for c in where.singles for n in c.levers} | {u.lever for u in where.untried} == set(LEVERS)


def test_of_equal_promises_that_which_one_trial_tells_all_about_comes_first():
    several = lever("several", parameter="num", settings=numbers(1, 2, 3), shortens=("data",), class_="exact")
    one = lever("one", shortens=("data",), class_="exact")
    names = [next(iter(c.levers)) for c in space(registry(several, one)).singles]
    assert names == ["one", "several", "several", "several"]


def test_what_can_be_switched_stands_before_what_compiles_and_what_needs_a_process():
    names = [next(iter(c.levers)) for c in space().singles]
    assert names[-2:] == ["compile", "affinity"]


# -- bounds ---------------------------------------------------------------------------------------------------------


def test_no_share_of_a_phase_rules_a_lever_out():
    assert bound_of(LEVERS["workers"], DIAGNOSIS) == math.inf == bound_of(LEVERS["bf16"], DIAGNOSIS)


def test_a_measured_counterfactual_limits_what_a_loader_lever_can_bring():
    assert bound_of(LEVERS["workers"], free_data(1.1, 1.15)) == pytest.approx(1.15)
    assert bound_of(LEVERS["workers"], free_data(1.1, math.nan)) == pytest.approx(1.1)
    assert bound_of(LEVERS["workers"], free_data(0.9, 0.95)) == 1.0
    assert bound_of(LEVERS["bf16"], free_data(1.1, 1.15)) == math.inf


# -- the choice -----------------------------------------------------------------------------------------------------


def test_of_two_sets_within_one_percent_the_smaller_one_is_preferred():
    small, large = trial({"a": {}}, 1.500), trial({"a": {}, "b": {}}, 1.514)
    assert best_of([large, small]) is small
    assert best_of([small, trial({"a": {}, "b": {}}, 1.516)]).ratio == 1.516


def test_of_two_sets_of_one_size_the_faster_one_is_preferred_however_little():
    assert best_of([trial({"a": {}}, 1.500), trial({"b": {}}, 1.501)]).levers == {"b": {}}


@pytest.mark.parametrize(
    "other",
    [
        trial({"b": {}}, 2.0, agreement="inconclusive"),
        trial({"b": {}}, 2.0, agreement=""),
        trial({"b": {}}, 2.0, outcome="disagrees", agreement="disagrees"),
        trial({"b": {}}, None, outcome="failed", agreement=""),
    ],
)
def test_a_set_whose_numbers_do_not_agree_is_never_chosen_however_fast(other):
    assert best_of([other]) is None
    assert best_of([other, trial({"a": {}}, 1.1)]).levers == {"a": {}}


def test_second_to_the_best_is_what_was_seen_to_be_faster():
    lucky = trial({"workers": {"num": 1}}, 1.41, "inconclusive", ratio_low=1.17)
    sure = trial({"bf16": {}}, 1.33, ratio_low=1.22)
    unclear = trial({"channels_last": {}}, 1.35, "inconclusive", ratio_low=0.97)
    trials = [sure, unclear, lucky]
    assert best_of(trials) is lucky
    assert second_to(lucky, trials) is sure
    assert second_to(sure, trials) is None


def test_nothing_is_chosen_where_nothing_gains_a_percent():
    assert best_of([]) is None
    assert best_of([trial({"a": {}}, 1.005), trial({"b": {}}, 0.9)]) is None


def test_only_what_was_measured_and_works_is_usable():
    assert usable(trial({"a": {}}, 0.9, outcome="slower"))
    for outcome in ("failed", "disagrees", "ruled out"):
        assert not usable(trial({"a": {}}, 1.2, outcome=outcome))
    assert not usable(trial({"a": {}}, None, outcome="inconclusive"))


def test_the_class_of_a_set_is_the_widest_of_its_levers():
    assert widest_class({}, LEVERS) == "exact"
    assert widest_class({"workers": {"num": 1}, "bf16": {}, "threads": {"num": 1}}, LEVERS) == "precision"


def test_the_levers_there_are_can_all_be_searched():
    from flatout.frameworks.pytorch.levers import registry as real

    levers = real()
    where = space_of(levers, FACTS, MACHINE, DIAGNOSIS, Choice(accept="semantics"))
    conducted(where, lambda levers: 1.05 ** len(levers), limit=2000)
    assert isinstance(where, Space) and LOADER in FACTS.loaders


def test_what_promises_to_be_worth_a_process_comes_before_what_compiles():
    def first_costly(promised):
        levers = registry(
            lever("bf16", class_="precision"), lever("compile", compiles=True),
            process("heap", promise=lambda self, facts: promised),
        )  # fmt: skip
        trials = conducted(space(levers), product(bf16=1.2, compile=1.1, heap=1.3))
        assert best_of(trials).levers.keys() == {"bf16", "compile", "heap"}
        return next(name for t in trials for name in ("compile", "heap") if name in t.levers)

    assert [first_costly(promised) for promised in (1.0, 1.04, 1.06, 2.0)] == ["compile", "compile", "heap", "heap"]


# -- the plan that is there -----------------------------------------------------------------------------------------


def test_the_script_begins_with_the_plan_that_is_there_whatever_that_costs():
    planned = {"bf16": {}, "compile": {}, "affinity": {}}
    begun = begun_with(space(), planned)
    first = next_candidate(begun, [])
    assert first.levers == planned
    assert next_candidate(begun, [trial(planned, 0.9, "slower", "")]) == next_candidate(space(), [])


def test_a_plan_has_its_settings_as_the_search_has_them():
    begun = begun_with(space(), {"threads": {"num": True}})
    found = screened(begun, product())[1][1]
    assert found.levers == {"threads": {"num": 1}} and found.levers["threads"]["num"] is not True


@pytest.mark.parametrize(
    "planned",
    [
        {"bf16": {"x": 1}}, {"threads": {"num": 3}}, {"fused_optimizer": {}, "foreach_optimizer": {}}, {"gone": {}},
        {"other_seeds": {}}, {},
    ],
)  # fmt: skip
def test_a_plan_that_the_search_could_not_have_made_is_not_tried(planned):
    assert begun_with(space(), planned) == space()
