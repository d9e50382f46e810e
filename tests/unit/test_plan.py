"""Levers, candidates and classes."""

import pytest

from flatout.frameworks.lever import Lever, verify
from flatout.records.plan import CLASSES, Candidate, allows, label
from handmade import FACTS, MACHINE, lever, trial


@pytest.mark.parametrize("accepted", CLASSES)
def test_each_class_admits_itself_and_those_before_it(accepted):
    admitted = [wanted for wanted in CLASSES if allows(accepted, wanted)]
    assert admitted == list(CLASSES[: CLASSES.index(accepted) + 1])


@pytest.mark.parametrize("words", [("fast", "exact"), ("exact", "fast")])
def test_a_word_that_is_no_class_is_a_mistake_of_the_caller(words):
    with pytest.raises(ValueError, match="not in tuple"):
        allows(*words)


def test_a_lever_that_keeps_the_contract_passes():
    verify(lever())
    verify(lever(toggles="process", engage=None, release=None, environment=lambda self, settings: {"X": "1"}))
    verify(lever(class_="exact", check="none"))
    verify(lever(parameter="num", settings=lambda self, facts, machine: ({"num": 1},)))


def tried(self, facts, machine):
    return ({},)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"summary": None}, "does not state its `summary`"),
        ({"class_": None}, "does not state its `class_`"),
        ({"shortens": None}, "does not state its `shortens`"),
        ({"check": None}, "does not state its `check`"),
        ({"name": "two words"}, "'two words', not an identifier of its own"),
        ({"name": "free_data"}, "'free_data', not an identifier of its own"),
        ({"parameter": "a b", "settings": tried}, "'a b', not an identifier of its own"),
        ({"class_": "harmless"}, "'harmless' as its `class_`, not one of exact, rounding"),
        ({"toggles": "often"}, "'often' as its `toggles`, not one of step, epoch, process"),
        ({"check": "by eye"}, "'by eye' as its `check`, not one of gradients"),
        ({"shortens": ("forward", "thinking")}, "which are not all phases"),
        ({"shortens": ()}, "does not state its `shortens`"),
        ({"conflicts": ("some",)}, "is among its own `conflicts`"),
        ({"partners": ("some",)}, "is among its own `conflicts` or `partners`"),
        ({"contains": ("other",)}, "`contains` what it can be combined with"),
        ({"check": "none"}, "changes numbers but names no check"),
        ({"parameter": "num"}, "takes `num` but has no `settings`"),
        ({"choices": ("quick",)}, "has no `parameter` that could be a choice"),
        ({"optional": True}, "has no `parameter` that could be a choice or be left out"),
        ({"parameter": "way", "choices": ("1",), "settings": tried}, "cannot all be typed"),
        ({"parameter": "way", "choices": ("a b",), "settings": tried}, "cannot all be typed"),
        ({"engage": None, "release": None}, "has no `engage`"),
        ({"release": None}, "has `engage` but no `release`"),
        ({"evidence": None}, "shows no `evidence`"),
        ({"toggles": "process", "engage": None, "release": None}, "no `environment` for a new process"),
    ],
)
def test_each_violation_of_the_contract_is_named_at_registration(changes, complaint):
    with pytest.raises(TypeError) as caught:
        verify(lever(**changes))
    assert complaint in str(caught.value)
    assert type(lever(**changes)).__name__ in str(caught.value)


def test_a_lever_that_does_not_say_whether_it_applies_cannot_be_made():
    with pytest.raises(TypeError, match="applies"):
        type("Silent", (Lever,), {"name": "silent"})()


def test_what_a_lever_leaves_out_does_nothing():
    plain = type("Plain", (Lever,), {"applies": lambda self, facts, machine: None})()
    assert plain.settings(FACTS, MACHINE) == ({},)
    assert plain.environment({}) == {} and plain.evidence(None) is None
    assert plain.engage(None, {}) is None and plain.release(None) is None


def test_sets_are_equal_whatever_the_order_in_which_they_were_put_together():
    one = Candidate(levers={"threads": {"num": 1}, "bf16": {}})
    other = Candidate(levers={"bf16": {}, "threads": {"num": 1}})
    assert one.key == other.key
    assert one.key != Candidate(levers={"threads": {"num": 2}, "bf16": {}}).key


def test_a_set_of_levers_reads_as_one_line():
    assert label({}) == "plain"
    assert label({"bf16": {}, "threads": {"num": 2}, "loader": {"a": 1, "b": "x"}}) == "bf16 threads=2 loader(a=1, b=x)"
    assert trial({"bf16": {}}).label == "bf16"
