"""What compiling is expected to take: from modules, until it has been seen."""

from dataclasses import replace

import pytest

from flatout.frameworks.pytorch.levers import registry
from flatout.records.plan import Candidate, Trial
from flatout.trials.budget import STARTING_S, compiling_s
from handmade import FACTS

LEVERS = registry()


def facts(num_modules, num_repeated_blocks=0):
    model = replace(FACTS.models[0], num_modules=num_modules, num_repeated_blocks=num_repeated_blocks)
    return replace(FACTS, models=(model,))


def expected_s(settings, found, trials=()):
    return compiling_s(Candidate(levers=settings), LEVERS, found, trials)


def test_what_does_not_compile_takes_nothing():
    assert expected_s({"threads": {"num": 1}}, facts(55)) == 0


@pytest.mark.parametrize(("num_modules", "seen_s"), [(6, 22), (55, 46), (55, 59)])
def test_the_guess_lies_beside_what_was_measured(num_modules, seen_s):
    assert seen_s / 1.5 < expected_s({"compile": {}}, facts(num_modules)) < 1.5 * seen_s


def test_of_blocks_that_repeat_one_is_compiled():
    whole, regional = (expected_s({"compile": words}, facts(56, 4)) for words in ({}, {"mode": "regional"}))
    assert regional - STARTING_S == pytest.approx((whole - STARTING_S) / 4)


def test_what_was_seen_here_counts_where_it_was_longer():
    trial = Trial(levers={"compile": {}}, outcome="slower", reason="", engage_s=90.0)
    other = replace(trial, levers={"threads": {"num": 1}}, engage_s=200.0)
    assert expected_s({"compile": {}}, facts(6), [trial, other]) == 90.0
