"""Laws that hold for every input, not only for the examples that somebody thought of."""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flatout.errors import RecordError
from flatout.judge.agreement import judge
from flatout.judge.anatomy import AS_IT_COMES, dissect
from flatout.judge.causes import Findings
from flatout.judge.diagnosis import diagnose
from flatout.judge.stats import compare, quantile, summarize
from flatout.records import plan_file, trace_file
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import CLASSES, Candidate, Trial, allows
from flatout.records.trace import OUTSIDE, PHASES, Agreement, Census, End, Failure, Header, Scaling, Toggle, Window
from flatout.trials.search.space import Choice, space_of
from flatout.trials.search.strategy import best_of, next_candidate
from handmade import (
    FACTS,
    HEADER,
    MACHINE,
    anatomy,
    gradients,
    lever,
    measured,
    plan,
    registry,
    screened,
    trial,
    window,
)

times = st.floats(min_value=1e-6, max_value=1e4)
pairs = st.lists(st.tuples(times, times), min_size=4, max_size=30)
texts = st.text(max_size=30)
finite = st.floats(allow_nan=False, allow_infinity=False)
levers_sets = st.dictionaries(
    st.sampled_from(["bf16", "threads", "workers", "odd name", "ü"]),
    st.dictionaries(
        st.sampled_from(["num", "x y"]), st.integers(-(2**60), 2**60) | texts | finite | st.booleans(), max_size=2
    ),
    max_size=4,
)


def split(rows):
    return [a for a, _ in rows], [b for _, b in rows]


# -- records --------------------------------------------------------------------------------------------------------


def anything(hint):
    """Any value of a record's field; numbers are finite, for NaN is not equal to itself."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:
        return finite
    if is_dataclass(hint):
        return st.builds(hint, **{name: anything(field) for name, field in get_type_hints(hint).items()})
    if origin is tuple:
        return st.lists(anything(inner[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(texts, anything(inner[1]), max_size=3)
    if origin is UnionType:
        return st.one_of(*(anything(each) for each in inner))
    return texts if hint is str else st.from_type(hint)


KINDS = [Header, Facts, Window, Census, Scaling, Toggle, Failure, End, Machine, Trial]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_record_comes_back_from_its_json(kind, data):
    record = data.draw(anything(kind))
    assert from_json(kind, json.loads(json.dumps(to_json(record), allow_nan=False))) == record


@settings(max_examples=50)
@given(step_s=st.lists(st.floats(), max_size=6), loss=st.lists(st.floats(), max_size=6))
def test_numbers_that_are_no_numbers_come_back_from_json_that_every_reader_takes(step_s, loss):
    record = window(step_s=step_s, losses=tuple(loss))
    text = json.dumps(to_json(record), allow_nan=False)
    found = from_json(Window, json.loads(text))
    for one, other in zip((*found.step_s, *found.losses), (*record.step_s, *record.losses), strict=True):
        assert one == other or (math.isnan(one) and math.isnan(other))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150)
@given(field=st.sampled_from(Header.__slots__), value=json_values)
def test_whatever_stands_in_a_field_it_is_read_or_refused_with_its_name(field, value):
    try:
        from_json(Header, {**to_json(HEADER), field: value}, where="here")
    except RecordError as problem:
        assert problem.error.startswith("here") and f"`{field}" in problem.error


# -- the trace ------------------------------------------------------------------------------------------------------

RECORDS = (
    HEADER,
    FACTS,
    window(purpose="ü\n\u2028 é"),
    measured(gradients(math.inf)),
    Failure(stage="script", error="E", message="x" * 500),
    End(num_steps=3, wall_s=0.5),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(0, len(RECORDS) - 1), max_size=8), data=st.data())
def test_a_follower_loses_no_record_and_yields_no_half_line_wherever_reads_fall(order, data, tmp_path):
    records = [RECORDS[i] for i in order]
    whole = b"".join(trace_file.encode(r).encode() + b"\n" for r in records)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"")
    follower, found = trace_file.Follower(path), []
    for start, end in itertools.pairwise([0, *cuts, len(whole)]):
        with open(path, "ab") as file:
            file.write(whole[start:end])
        found += follower.new()
        assert found == records[: whole[:end].count(b"\n")]
    assert found == records


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(1, len(RECORDS) - 1), max_size=6), cut=st.floats(0, 1))
def test_a_trace_cut_anywhere_is_read_up_to_there_and_says_whether_it_is_torn(order, cut, tmp_path):
    records = [HEADER, *(RECORDS[i] for i in order)]
    first = len(trace_file.encode(HEADER).encode()) + 1
    whole = b"".join(trace_file.encode(r).encode() + b"\n" for r in records)
    end = first + round(cut * (len(whole) - first))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(whole[:end])
    reader = trace_file.Reader(path)
    assert [*reader] == records[: whole[:end].count(b"\n")]
    assert reader.torn == (not whole[:end].endswith(b"\n"))


# -- statistics -----------------------------------------------------------------------------------------------------


@given(st.lists(times, min_size=4, max_size=30))
def test_plain_against_itself_is_never_faster_or_slower(samples):
    same = max(samples) - min(samples) < 1e-9 * max(samples)  # no clock that runs gives such windows
    assert compare(samples, samples).verdict == ("inconclusive" if same else "no difference")


@given(pairs)
def test_swapping_the_sides_inverts_the_ratio_and_the_verdict(rows):
    base, other = split(rows)
    there, back = compare(base, other), compare(other, base)
    if math.isnan(there.ratio):
        assert math.isnan(back.ratio) and there.reason == back.reason
        return
    assert there.ratio * back.ratio == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0) and there.high99 * back.low99 == pytest.approx(1.0)
    # 0.98 to 1.02 is not its own inverse: 1.0199 is within, 1/1.0199 is, 1/0.9801 is not
    inverse = {"faster": {"slower"}, "slower": {"faster"}}
    assert back.verdict in inverse.get(there.verdict, {"no difference", "inconclusive"})


@given(pairs, st.sampled_from([1e-3, 1e3, 60.0, 2.0**-10]))
def test_the_unit_of_time_changes_nothing(rows, unit):
    base, other = split(rows)
    one, scaled = compare(base, other), compare([x * unit for x in base], [x * unit for x in other])
    assert scaled.ratio == pytest.approx(one.ratio, nan_ok=True)
    assert scaled.low99 == pytest.approx(one.low99, nan_ok=True)
    near = min(abs(one.low99 - 1), abs(one.high99 - 1), abs(one.low - 0.98), abs(one.high - 1.02)) < 1e-9
    assert near or scaled.verdict == one.verdict


@given(pairs)
def test_intervals_hold_the_ratio_and_the_wider_holds_the_narrower(rows):
    found = compare(*split(rows))
    assume(math.isfinite(found.ratio))
    assert found.low99 <= found.low <= found.ratio <= found.high <= found.high99


@given(pairs, st.randoms(use_true_random=False))
def test_the_order_of_pairs_changes_nothing(rows, chance):
    mixed = list(rows)
    chance.shuffle(mixed)
    one, other = compare(*split(rows)), compare(*split(mixed))
    assert other.ratio == pytest.approx(one.ratio, nan_ok=True) and other.verdict == one.verdict


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=12))
def test_whatever_the_samples_there_is_an_answer(rows):
    found = compare(*split(rows))
    assert found.verdict in ("faster", "slower", "no difference", "inconclusive")
    assert (found.verdict == "inconclusive") == bool(found.reason)
    if found.verdict == "faster":
        assert found.low99 > 1
    if any(not (math.isfinite(x) and x > 0) for row in rows for x in row):
        assert found.verdict == "inconclusive"


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_lie_between_the_smallest_and_the_largest_sample(samples, share):
    ordered = sorted(samples)
    assert ordered[0] <= quantile(ordered, share) + 1e-6 and quantile(ordered, share) - 1e-6 <= ordered[-1]
    assert summarize(samples).num == len(samples)


# -- the account of a step ------------------------------------------------------------------------------------------


@st.composite
def observed(draw):
    """Windows whose phases were measured: parts of each step, in any share, with anything left over."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        num = draw(st.integers(1, 5))
        names = draw(st.sets(st.sampled_from([p for p in PHASES if p != "unattributed"]), max_size=6))
        phases = {n: draw(st.lists(st.floats(0, 0.15), min_size=num, max_size=num)) for n in names}
        outside = [sum(phases[n][i] for n in ("evaluation", "checkpoint") if n in phases) for i in range(num)]
        rest = draw(st.lists(st.floats(1e-6, 1.0), min_size=num, max_size=num))
        step_s = [rest[i] + sum(row[i] for row in phases.values()) for i in range(num)]
        found.append(window(step_s, phases, outside_s=outside))
    return found


@given(observed())
def test_phases_sum_to_the_step_and_what_lies_outside_never_enters(windows):
    found = dissect(windows)
    assert math.fsum(found.phases_s.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert found.step_s == pytest.approx(sum(w.training_s for w in windows) / sum(w.num_steps for w in windows))
    assert not {"evaluation", "checkpoint"} & set(found.phases_s)
    assert all(seconds >= -1e-9 for seconds in found.phases_s.values())


@given(observed())
def test_a_phase_is_either_in_the_account_or_named_as_not_observed(windows):
    found = dissect(windows)
    assert not set(found.phases_s) & set(found.not_observed)
    seen = {name for w in windows for name in w.phases}
    assert set(found.not_observed).isdisjoint(seen)
    inside = {p for p in PHASES if p not in (*OUTSIDE, *AS_IT_COMES)}
    assert inside <= set(found.phases_s) | set(found.not_observed)


@given(observed(), st.floats(1e-3, 1e3))
def test_the_unit_of_time_changes_no_share(windows, unit):
    scaled = [
        replace(
            w,
            step_s=tuple(x * unit for x in w.step_s),
            outside_s=tuple(x * unit for x in w.outside_s),
            phases={n: tuple(x * unit for x in row) for n, row in w.phases.items()},
        )
        for w in windows
    ]
    one, other = dissect(windows), dissect(scaled)
    for name in one.phases_s:
        assert other.share(name) == pytest.approx(one.share(name), abs=1e-9)


# -- the diagnosis --------------------------------------------------------------------------------------------------

shares = st.fixed_dictionaries(
    {name: st.floats(0, 1) for name in ("data", "forward", "backward", "optimizer", "loss", "sync", "unattributed")}
)


def blame(phases_s, free_data=None):
    """The bound of free data, and whether the input binds."""
    counterfactuals = {"free_data": free_data} if free_data is not None else {}
    found = diagnose(Findings(anatomy=anatomy(phases_s), facts=FACTS, num_cores=2, counterfactuals=counterfactuals))
    return next(b.ratio for b in found.bounds if b.remedy == "free data"), found.binding == "input"


@given(shares, st.floats(0, 10))
def test_waiting_longer_for_the_loader_never_lowers_its_blame(phases_s, wait_s):
    assume(sum(phases_s.values()) > 1e-3)
    before, bound = blame(phases_s)
    longer, still_bound = blame({**phases_s, "data": phases_s["data"] + wait_s})
    assert longer >= before * (1 - 1e-9)
    assert still_bound or not bound


@given(shares, st.floats(0, 10), st.floats(1.0, 5.0), st.floats(0, 0.5))
def test_nor_does_it_where_a_counterfactual_was_measured(phases_s, wait_s, ratio, spread):
    assume(sum(phases_s.values()) > 1e-3)
    base = [ratio * (1 + spread * x) for x in (-1, -0.3, 0.3, 1, 0.1)]
    free_data = compare(base, [1.0] * 5)
    assume(math.isfinite(free_data.ratio))
    _, bound = blame(phases_s, free_data)
    _, still_bound = blame({**phases_s, "data": phases_s["data"] + wait_s}, free_data)
    assert still_bound or not bound


@given(shares)
def test_a_diagnosis_of_anything_names_a_binding_and_bounds_of_at_least_one(phases_s):
    assume(sum(phases_s.values()) > 1e-3)
    found = diagnose(Findings(anatomy=anatomy(phases_s), facts=FACTS, num_cores=2, counterfactuals={}))
    assert found.sentence and all(b.ratio >= 1 and math.isfinite(b.ratio) for b in found.bounds)
    ratios = [b.ratio for b in found.bounds]
    assert ratios == sorted(ratios, reverse=True)


# -- agreement ------------------------------------------------------------------------------------------------------

differences = st.builds(
    gradients,
    st.floats(min_value=0) | st.just(math.nan),
    slope=st.floats(),
    noise=st.none() | st.floats(),
    baseline_error=st.floats(min_value=0) | st.just(math.nan),
    random_states_equal=st.booleans(),
    finite=st.booleans(),
    explained_cosine=st.none() | st.floats(),
)
ORDER = ("agrees", "inconclusive", "disagrees")


@given(differences, st.sampled_from(CLASSES))
def test_what_agrees_was_measured_and_is_a_number(found, class_):
    verdict = judge([measured(found)], class_, ("gradients",)).verdict
    if verdict == "agrees":
        assert found.finite and math.isfinite(found.error) and found.random_states_equal
    if class_ == "exact" and found.baseline_error == 0 and found.error > 0:
        assert verdict != "agrees"


@given(differences, differences, st.sampled_from(CLASSES))
def test_another_point_of_training_never_makes_numbers_agree_better(one, other, class_):
    alone = judge([measured(one)], class_, ("gradients",)).verdict
    both = judge([measured(one), measured(other)], class_, ("gradients",)).verdict
    assert ORDER.index(both) >= ORDER.index(alone)


@given(differences, st.floats(1.0, 1e6))
def test_a_larger_error_never_agrees_better(found, factor):
    for class_ in ("exact", "rounding", "precision"):
        small = judge([measured(found)], class_, ("gradients",)).verdict
        large = judge([measured(replace(found, error=found.error * factor))], class_, ("gradients",)).verdict
        assert ORDER.index(large) >= ORDER.index(small)


@given(st.sampled_from(CLASSES), st.lists(st.sampled_from(["gradients", "updates", "batches"]), min_size=1))
def test_nothing_measured_never_agrees(class_, checks):
    for points in ([], [Agreement(levers={}, differences=())]):
        assert judge(points, class_, checks).verdict == "inconclusive"


# -- plans ----------------------------------------------------------------------------------------------------------

plans = st.builds(
    plan,
    script=texts,
    arguments=st.lists(texts, max_size=3).map(tuple),
    levers=levers_sets,
    agreement=texts,
    num_pairs=st.integers(0, 2**40),
    ratio=st.integers(1, 999_999).map(lambda n: n / 1000),
    machine=st.builds(
        lambda cores, quota, name: replace(MACHINE, num_cores=cores, cores_quota=quota, cpu=name),
        st.integers(1, 256), st.none() | st.floats(0.1, 64), texts,
    ),
)  # fmt: skip


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(plans, min_size=1, max_size=3, unique_by=lambda p: p.script))
def test_plans_survive_their_file_beside_each_other(tmp_path, made):
    path = tmp_path / "flatout.toml"
    path.unlink(missing_ok=True)
    for each in made:
        plan_file.write(each, path)
    assert plan_file.scripts(path) == tuple(each.script for each in made)
    for each in made:
        assert plan_file.read(path, each.script) == each
    again = replace(made[0], num_pairs=7)
    plan_file.write(again, path)
    assert plan_file.read(path, again.script) == again
    assert [plan_file.read(path, each.script) for each in made[1:]] == made[1:]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_file_whatever_it_holds_breaks_the_reader_or_is_written_over(tmp_path, content):
    path = Path(tmp_path / "flatout.toml")
    path.write_bytes(content)
    with pytest.raises(RecordError):
        plan_file.read(path, "train.py")
    if content:  # an empty file is nobody's work
        with pytest.raises(RecordError):
            plan_file.write(plan(), path)
        assert path.read_bytes() == content


@given(st.sampled_from(CLASSES), st.sampled_from(CLASSES), st.sampled_from(CLASSES))
def test_classes_are_ordered(a, b, c):
    assert allows(a, a)
    assert allows(a, b) or allows(b, a)
    if allows(a, b) and allows(b, c):
        assert allows(a, c)


# -- the search -----------------------------------------------------------------------------------------------------

FREE = registry(*(lever(name) for name in "abcd"), lever("e", compiles=True))
ANATOMY = anatomy({"forward": 0.5, "backward": 0.5})
DIAGNOSIS = diagnose(Findings(anatomy=ANATOMY, facts=FACTS, num_cores=2, counterfactuals={}))


@settings(max_examples=60)
@given(st.fixed_dictionaries({name: st.floats(0.5, 2.0) for name in FREE}))
def test_where_levers_multiply_the_search_finds_the_best_set(factors):
    def speed(levers):
        return math.prod(factors[name] for name in levers)

    where = space_of(FREE, FACTS, MACHINE, DIAGNOSIS, Choice())
    trials = [trial(t.levers, speed(t.levers)) for t in screened(where, speed)[0].trials]  # in pairs, as `tune` does
    while (candidate := next_candidate(where, trials)) is not None:
        trials.append(trial(candidate.levers, speed(candidate.levers)))
    best = best_of(trials)
    true_best = math.prod(max(f, 1.0) for f in factors.values())
    assert speed(best.levers if best else {}) >= true_best / 1.011 ** len(FREE)


@settings(max_examples=60)
@given(st.data())
def test_whatever_trials_bring_the_search_ends_and_repeats_nothing(data):
    levers = registry(
        lever("a", conflicts=("b",)),
        lever("b"),
        lever("c", parameter="num", settings=lambda self, facts, machine: ({"num": 1}, {"num": 2})),
        lever("bf16"),
        lever("channels_last"),
        lever("e", compiles=True, conflicts=("c",)),
    )
    where = space_of(levers, FACTS, MACHINE, DIAGNOSIS, Choice())
    outcomes = st.sampled_from(["faster", "slower", "no difference", "inconclusive", "disagrees", "failed"])
    trials = []
    while (candidate := next_candidate(where, trials)) is not None:
        assert len(trials) <= 2**5 * 3
        assert candidate.key not in [Candidate(levers=t.levers).key for t in trials]
        assert not {"a", "b"} <= set(candidate.levers) and not {"c", "e"} <= set(candidate.levers)
        outcome = data.draw(outcomes)
        ratio = None if outcome == "failed" else data.draw(st.floats(0.5, 3.0))
        agreement = data.draw(st.sampled_from(["agrees", "inconclusive", ""]))
        trials.append(trial(candidate.levers, ratio, outcome, agreement))
