"""What earlier tunings say: whose they are listened to, what they move, where they lie, and how they are forgotten."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.cli import flatout
from flatout.judge.diagnosis import Diagnosis
from flatout.records.plan import Candidate
from flatout.run.script import Script
from flatout.trials.former import Former, digest_of
from flatout.trials.search import priors, priors_file
from flatout.trials.search.priors import Place, Traits, Tried, Tuning, advice, likeness, place_of, traits_of, tuning_of
from flatout.trials.search.priors_file import MOST_TUNINGS, forget_priors, keep, kept_priors
from flatout.trials.search.space import Choice, advised, space_of
from flatout.trials.search.strategy import best_of, is_reordered, next_candidate
from handmade import FACTS, HEADER, MACHINE, MODEL, anatomy, lever, registry, trial

HERE = Place(machine="0f3a", framework="pytorch 2.13", device="cpu")
SHARES = {"data": 0.1, "forward": 0.4, "backward": 0.4, "optimizer": 0.1}
TRAITS = Traits(
    script="this", binding="compute", kinds=("convolution 2",), dtypes=("float32",), shares=SHARES, step_s=0.01
)
OTHER = replace(TRAITS, script="other")
ANATOMY = anatomy(SHARES)
DIAGNOSIS = Diagnosis(binding="compute", sentence="compute", evidence=(), bounds=())


def tried(levers, ratio, outcome="faster", agreement="agrees", wide=0.0):
    log = math.log(ratio)
    return Tried(
        levers=levers, outcome=outcome, agreement=agreement, log_ratio=log, log_low=log - wide, log_high=log + wide
    )


def tuning(*sets, traits=OTHER, won=None, place=HERE):
    return Tuning(format=1, place=place, traits=traits, tried=sets, won=won or {})


def key(**levers):
    return Candidate(levers=levers).key


def process(name):
    return lever(name, class_="exact", check="none", toggles="process", engage=None, release=None,
                 environment=lambda self, settings: {"X": "1"})  # fmt: skip


LEVERS = registry(
    *(lever(name) for name in "abc"), lever("d", conflicts=("c",)), lever("p", partners=("a",)),
    lever("n", parameter="num", settings=lambda self, facts, machine: ({"num": 1}, {"num": 2})),
    lever("compile", compiles=True), process("heap"), process("bound"),
)  # fmt: skip
USUAL = space_of(LEVERS, FACTS, MACHINE, (ANATOMY, DIAGNOSIS), Choice())


def order(space, speed=lambda levers: 0.99, limit=500):
    """All sets that are tried, in their order."""
    trials = []
    while (candidate := next_candidate(space, trials)) is not None:
        assert len(trials) < limit, "it does not end"
        ratio = speed(candidate.levers)
        trials.append(
            trial(candidate.levers, ratio, "faster" if ratio > 1 else "slower", "agrees" if ratio > 1 else "")
        )
    return trials


def names(trials):
    return [set(t.levers) for t in trials]


# -- whom to listen to ----------------------------------------------------------------------------------------------


def test_a_tuning_of_another_machine_version_or_device_says_nothing():
    for place in (replace(HERE, machine="77"), replace(HERE, framework="pytorch 2.12"), replace(HERE, device="cuda")):
        found = advice([tuning(tried({"a": {}}, 1.5), won={"a": {}}, place=place)], HERE, TRAITS)
        assert found == priors.Advice()


def test_patches_of_a_version_share_a_place():
    assert place_of("0f3a", "pytorch", "2.13.1+cu126", "cpu") == HERE


@pytest.mark.parametrize(
    "change",
    [
        {"binding": "input"},
        {"kinds": ("recurrent",)},
        {"dtypes": ("bfloat16",)},
        {"shares": {"data": 1.0}},
        {"step_s": 10.0},
    ],
)
def test_scripts_are_less_alike_the_more_they_differ(change):
    assert likeness(TRAITS, OTHER) == pytest.approx(1.0)
    assert likeness(TRAITS, replace(OTHER, **change)) < 0.8
    assert likeness(TRAITS, replace(TRAITS, **change)) >= 0.5, "the same script is listened to whatever its arguments"


def test_a_script_that_is_unlike_says_nothing():
    unlike = replace(OTHER, binding="input", shares={"data": 0.9, "forward": 0.1})
    assert advice([tuning(tried({"a": {}}, 1.5), won={"a": {}}, traits=unlike)], HERE, TRAITS) == priors.Advice()


def test_what_is_seen_of_a_script_is_what_it_computes_with_and_where_its_time_goes():
    found = traits_of("0f3a", replace(FACTS, attention=("math",)), ANATOMY, DIAGNOSIS)
    assert (found.kinds, found.dtypes) == (("attention", "convolution 2"), ("float32",))
    assert found.shares["forward"] == pytest.approx(0.4) and found.binding == "compute"
    dense = replace(FACTS, models=(replace(MODEL, convolution_dims=()),))
    assert traits_of("0f3a", dense, ANATOMY, DIAGNOSIS).kinds == ("dense",)


# -- what they say --------------------------------------------------------------------------------------------------


def test_more_tunings_that_agree_are_believed_more_and_those_that_do_not_less():
    one = advice([tuning(tried({"a": {}}, 1.5))], HERE, TRAITS).expected[key(a={})]
    two = advice([tuning(tried({"a": {}}, 1.5))] * 2, HERE, TRAITS).expected[key(a={})]
    against = advice([tuning(tried({"a": {}}, 1.5)), tuning(tried({"a": {}}, 1 / 1.5, "slower"))], HERE, TRAITS)
    assert 0 < one < two < math.log(1.5) and not against.expected


def test_what_broke_counts_as_a_loss_and_what_could_not_be_compared_as_nothing():
    found = advice(
        [tuning(tried({"a": {}}, 1.5, "disagrees"), Tried(levers={"b": {}}, outcome="failed"),
                tried({"c": {}}, 1.5, agreement="inconclusive"))], HERE, TRAITS,
    )  # fmt: skip
    assert found.expected[key(a={})] < 0 and found.expected[key(b={})] < 0 and key(c={}) not in found.expected


def test_the_set_that_the_script_was_tuned_to_last_is_its_own_and_not_one_from_before():
    former = tuning(tried({"a": {}}, 1.5), traits=TRAITS, won={"a": {}})
    latest = tuning(tried({"b": {}}, 1.4), traits=TRAITS, won={"b": {}})
    nothing = tuning(tried({"b": {}}, 0.9, "slower"), traits=TRAITS)
    assert advice([former, latest], HERE, TRAITS).own == ({"b": {}},)
    assert advice([former, nothing], HERE, TRAITS).own == ()
    assert advice([former], HERE, OTHER).own == () and advice([former], HERE, OTHER).former == ({"a": {}},)


def test_of_a_set_that_was_measured_again_that_counts():
    again = trial({"a": {}}, 0.98, "no difference", remeasured=True)
    unknown = trial({"c": {}}, None, "inconclusive", "")
    kept = tuning_of(HERE, TRAITS, [trial({"a": {}}, 1.3), trial({"b": {}}, None, "failed", ""), unknown, again], {})
    assert [(t.levers, t.outcome) for t in kept.tried] == [({"a": {}}, "no difference"), ({"b": {}}, "failed")]


# -- what they move -------------------------------------------------------------------------------------------------


def test_without_earlier_tunings_the_order_is_the_usual_one():
    assert advised(USUAL, {}) == USUAL and not is_reordered(advised(USUAL, {}), USUAL)
    assert names(order(advised(USUAL, {}))) == names(order(USUAL))


def test_what_won_comes_first_and_what_lost_last_within_its_cost():
    said = {key(c={}): 0.2, key(n={"num": 2}): 0.3, key(a={}): -0.3, key(heap={}): 0.5}
    found = [Candidate(levers=t.levers).key for t in order(advised(USUAL, said))]
    assert found[:2] == [key(n={"num": 2}), key(c={})]
    cheap = [k for k in found if not {"compile", "heap", "bound"} & {name for name, _ in k}]
    assert cheap[-1] == key(a={}) and found[-1] == key(heap={}, bound={})
    assert is_reordered(advised(USUAL, said), USUAL)


def test_the_same_script_begins_with_what_it_was_tuned_to_whatever_that_costs():
    own = {"a": {}, "compile": {}, "heap": {}}
    found = order(advised(USUAL, {}, own=[own], former=[{"b": {}, "c": {}}, {"b": {}, "compile": {}}]))
    assert found[0].levers == own and found[1].levers == {"b": {}, "c": {}}
    compiled = [t.levers for t in found if "compile" in t.levers and t.levers != own]
    assert compiled[0] == {"b": {}, "compile": {}}, "what similar scripts won with waits for its cost"


def test_a_former_winner_that_the_search_could_not_have_made_is_not_tried():
    impossible = [{"a": {"x": 1}}, {"n": {"num": 3}}, {"c": {}, "d": {}}, {"gone": {}}, {}]
    assert advised(USUAL, {}, own=impossible, former=impossible) == USUAL


def test_a_lever_is_not_promised_more_than_its_bound():
    levers = registry(lever("small", shortens=("optimizer",)), lever("large"))
    usual = space_of(levers, FACTS, MACHINE, (ANATOMY, DIAGNOSIS), Choice())
    found = advised(usual, {key(small={}): 2.0, key(large={}): 0.5})
    assert names(order(found))[0] == {"large"}


def test_a_lever_that_lost_before_is_no_company_for_others_in_a_process():
    found = names(order(advised(USUAL, {key(bound={}): -0.2})))
    assert found[-2:] == [{"heap"}, {"bound"}]


gains = st.dictionaries(
    st.sampled_from([c.key for c in USUAL.singles] + [key(a={}, p={}), key(gone={}), key(n={"num": True})]),
    st.floats(-5, 5),
    max_size=8,
)
sets = st.lists(
    st.dictionaries(st.sampled_from([*LEVERS, "gone"]), st.sampled_from([{}, {"num": 1}, {"num": 2}, {"num": 9}])),
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(gains, sets, sets, st.fixed_dictionaries({name: st.floats(0.6, 1.6) for name in LEVERS}))
def test_another_order_neither_adds_nor_takes_away_what_may_be_tried_nor_what_is_found(said, own, former, factors):
    def speed(levers):
        return math.prod(factors[name] ** settings.get("num", 1) for name, settings in levers.items())

    space = advised(USUAL, said, own, former)
    trials = order(space, speed)
    keys = [Candidate(levers=t.levers).key for t in trials]
    assert len(set(keys)) == len(keys)
    admitted = {c.key for c in USUAL.singles}
    assert all(key(**{n: s}) in admitted for t in trials for n, s in t.levers.items())
    assert not any({"c", "d"} <= set(t.levers) for t in trials)
    cheap = {c.key for c in USUAL.singles if not {"compile", "heap", "bound"} & set(c.levers)} | {key(a={}, p={})}
    assert cheap <= set(keys), "every cheap lever is tried, whatever is said of it"
    assert {name for t in trials for name in t.levers} == set(LEVERS)
    usual, found = best_of(order(USUAL, speed)), best_of(trials)
    assert (found.ratio if found else 1.0) >= (usual.ratio if usual else 1.0) / 1.011 ** len(LEVERS)


# -- where they lie -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flatout" / "priors"


ONE = tuning(tried({"a": {}, "n": {"num": 2}}, 1.5), Tried(levers={"b": {}}, outcome="failed"), won={"a": {}})


def test_a_tuning_comes_back_from_its_file_and_the_latest_comes_last(folder):
    assert keep(ONE) == "" and keep(replace(ONE, won={})) == ""
    first, last = kept_priors().tunings
    assert first.won == ONE.won and last.won == {} and first.tried[0] == ONE.tried[0]
    assert math.isnan(first.tried[1].log_ratio)
    assert kept_priors().num_unreadable == 0 and kept_priors().size_bytes < 2000


def test_only_the_latest_are_kept(folder):
    folder.mkdir(parents=True)
    for number in range(MOST_TUNINGS + 20):
        (folder / f"{number:020d}-0000000a.json").write_text("{}")
    (folder / "mine.txt").write_text("precious")
    assert keep(ONE) == ""
    assert len(list(folder.glob("*.json"))) == MOST_TUNINGS and (folder / "mine.txt").exists()
    assert len(kept_priors().tunings) == 1


def test_several_tunings_that_end_at_once_are_all_kept(folder, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_priors import ONE, keep; [keep(ONE) for _ in range(20)]"
    )
    here = os.path.dirname(__file__)
    paths = os.pathsep.join([os.path.dirname(here), here])
    environment = {**os.environ, "PYTHONPATH": paths}
    running = [subprocess.Popen([sys.executable, "-c", code, here], env=environment) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert len(kept_priors().tunings) == 60 and not list(folder.glob("*.new"))


HOSTILE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"format": 1}',
    b" " * 300_000,
    b'{"format": ' + b"9" * 5000 + b"}",
]


def changed(**changes):
    whole = json.loads(json.dumps(priors_file.to_json(ONE)))
    return json.dumps({**whole, **changes}).encode()


HOSTILE += [
    changed(format=2),
    changed(format="1"),
    changed(tried=[{"levers": {"a": {}}, "outcome": "faster", "log_ratio": 1e9}]),
    changed(tried=[{"levers": {"a": {}}, "outcome": "faster", "log_ratio": "Infinity"}]),
    changed(tried=[{"levers": {"a": {"num": [1]}}, "outcome": "faster"}]),
    changed(tried=[{"levers": "a", "outcome": "faster"}]),
    changed(won=["a"]),
    changed(traits={**priors_file.to_json(OTHER), "step_s": 0}),
    changed(traits={**priors_file.to_json(OTHER), "step_s": -1.0}),
    changed(traits={**priors_file.to_json(OTHER), "shares": {"data": 1e308}}),
    changed(place=None),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_torn_or_foreign_file_costs_itself_and_nothing_else(folder, number):
    assert keep(ONE) == ""
    (folder / f"{0:020d}-00000000.json").write_bytes(HOSTILE[number])
    found = kept_priors()
    assert len(found.tunings) == 1 and found.num_unreadable == 1


def test_what_is_no_plain_file_is_neither_waited_for_nor_followed(folder, tmp_path):
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{0:020d}-00000000.json")
    (folder / f"{1:020d}-00000000.json").mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(changed())
    (folder / f"{2:020d}-00000000.json").symlink_to(secret)
    found = kept_priors()
    assert found.tunings == () and found.num_unreadable == 3


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_file_whatever_it_holds_breaks_the_reader(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{0:020d}-00000000.json").write_bytes(content)
    assert kept_priors().num_unreadable == 1


steps_s = st.floats(5e-324, 1.7e308)
traits = st.builds(
    Traits, script=st.sampled_from(["this", "other"]), binding=st.text(max_size=3),
    kinds=st.lists(st.text(max_size=3), max_size=2).map(tuple), dtypes=st.just(()),
    shares=st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=3), step_s=steps_s,
)  # fmt: skip
logs = st.floats(-priors.LARGEST, priors.LARGEST) | st.just(math.nan)
scalars = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.booleans()
anything = st.builds(
    Tuning, format=st.just(1), place=st.just(HERE), traits=traits,
    won=st.dictionaries(st.text(max_size=2), st.dictionaries(st.text(max_size=2), scalars, max_size=2), max_size=2),
    tried=st.lists(
        st.builds(Tried, levers=st.just({"a": {}}), outcome=st.text(max_size=3), log_ratio=logs, log_low=logs,
                  log_high=logs), max_size=3).map(tuple),
)  # fmt: skip


@given(st.lists(anything, max_size=4), traits)
def test_whatever_a_readable_file_says_there_is_advice_and_it_is_finite(tunings, mine):
    found = advice([one for one in tunings if not priors.fault(one)], HERE, mine)
    assert all(math.isfinite(gain) for gain in found.expected.values())
    advised(USUAL, found.expected, found.own, found.former)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said_and_ends_nothing(folder):
    folder.parent.mkdir(parents=True)
    folder.parent.chmod(0o500)
    said = keep(ONE)
    folder.parent.chmod(0o700)
    assert "Permission denied" in said and kept_priors().tunings == ()


def test_a_file_in_the_place_of_the_folder_is_said_and_ends_nothing(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("mine")
    assert "File exists" in keep(ONE) and kept_priors().num_files == 0
    assert folder.read_text() == "mine" and forget_priors().num_tunings == 0


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(priors_file, "cache_folder", lambda: None)
    assert keep(ONE) == "there is no home" and kept_priors().num_files == 0 and forget_priors().folder is None


# -- how they are used and forgotten --------------------------------------------------------------------------------


class Plain:
    anatomy, diagnosis = ANATOMY, DIAGNOSIS


def test_a_tuning_reads_what_former_ones_left_and_says_that_it_changed_the_order(folder):
    script, said = Script(path="train.py"), []
    place = place_of(MACHINE.machine_key(), HEADER.framework, HEADER.framework_version, FACTS.device)
    keep(tuning(tried({"c": {}}, 1.5), traits=replace(TRAITS, script=digest_of(script)), won={"c": {}}, place=place))
    (folder / f"{0:020d}-00000000.json").write_text("{")
    former = Former(script, said.append)
    space = former.advised(USUAL, (HEADER, FACTS, MACHINE), Plain())
    assert next_candidate(space, []).levers == {"c": {}}
    assert former.said == (
        "an earlier tuning on this machine decided what was tried first, first this script's last plan "
        "(`--no-priors`: the usual order)"
    )
    assert len(said) == 1 and said[0].startswith("a file of earlier tunings in ")
    none = Former()
    assert none.advised(USUAL, (HEADER, FACTS, MACHINE), Plain()) is USUAL and none.said == ""


def test_the_same_script_has_one_digest_and_it_does_not_tell_which(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = digest_of(Script(path="train.py", arguments=("--lr", "1")))
    assert one == digest_of(Script(path=str(tmp_path / "train.py"))) and len(one) == 16
    assert one != digest_of(Script(path="other.py")) and one != digest_of(Script(module="train"))


def typed(capsys, *words, code=0):
    assert (flatout.main(["machine", *words], prog_name="flatout") or 0) == code
    return capsys.readouterr()


def test_they_are_forgotten_by_a_command_that_says_from_where(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert typed(capsys, "--forget-priors").out == f"no earlier tuning is kept in {folder}\n"
    keep(ONE), keep(ONE)
    (folder / "mine.txt").write_text("precious")
    assert typed(capsys, "--forget-priors").out == f"removed 2 earlier tunings from {folder}\n"
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    keep(ONE)
    assert json.loads(typed(capsys, "--forget-priors", "--json").out) == {"num_tunings": 1, "folder": str(folder)}
    assert not folder.exists()
    assert "either" in typed(capsys, "--forget-priors", "--refresh", code=2).err
