"""What a model changes outside of itself is noticed; what it only keeps for itself, and what it reads, is not."""

import logging
import random
import types
from collections import defaultdict, deque
from functools import wraps

import pytest
import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.outside_state import OutsideState

LISTED, KEPT, COUNTED, MASKS = [], {"of": 0.5}, 0, {}
LAST = torch.zeros(2)
ROWS = deque(maxlen=2)


class Settings:
    total = 0

    def __init__(self):
        self.temperature, self.seen = 1.0, []


SETTINGS = Settings()
LISTS = defaultdict(list, loss=[], rows=[torch.zeros(2)])
GENERATOR, LOGGER = random.Random(0), logging.getLogger(__name__)
OTHER = types.ModuleType("other")
exec("LAST, ROWS = 0.0, []\ndef helper(row): ROWS.append(row)", vars(OTHER))


def decorated(function):
    @wraps(function)
    def called(*args):
        return function(*args)

    return called


@torch.no_grad()
@decorated
def DECORATED(x):
    LISTED.append(x)


def helper(value):
    KEPT["of"] = value


class Model(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


def lists(x):
    LISTED.append(x)


def calls_a_helper(x):
    helper(float(x.sum()))


def counts(x):
    global COUNTED
    COUNTED += 1


def writes_in_place(x):
    LAST.copy_(x)


def goes_round(x):
    ROWS.append(x)


def sets_a_field(x):
    SETTINGS.temperature = float(x.sum())


def sets_within_a_comprehension(x):
    [SETTINGS.seen.append(one) for one in x]


def sets_a_new_field_that_is_trained(x):
    SETTINGS.aside = x.requires_grad_()


def lists_under_a_name(x):
    LISTS["loss"].append(x)


def writes_into_a_row(x):
    LISTS["rows"][0].copy_(x)


def is_decorated(x):
    DECORATED(x)


def calls_another_file(x):
    OTHER.helper(x)


def sets_a_variable_of_another_file(x):
    OTHER.LAST = float(x.sum())


def adds_to_a_class(x):
    Settings.total += 1


def counts_its_calls(x):
    counts_its_calls.num += 1


def keeps_what_is_trained(x):
    MASKS["trained"] = x.requires_grad_()


def keeps_a_mask(x):
    MASKS.setdefault(len(x), torch.ones(len(x)))


counts_its_calls.num = 0
MADE_LATE = None


def makes_a_mask_late(x):
    global MADE_LATE
    MADE_LATE = torch.ones(len(x)) if MADE_LATE is None else MADE_LATE


def sets_what_was_not_there(x):
    global NOT_THERE
    NOT_THERE = float(x.sum())


class Tally:
    @staticmethod
    def add(x):
        ROWS.append(x)

    def note(self, x):
        KEPT["of"] = KEPT["of"] + float(x.sum()) + 1


TALLY, SEEN, USAGE = Tally(), {1}, {"usage": [0.0] * 500}


def adds_by_a_static_method(x):
    Tally.add(x)


def notes_by_a_method(x):
    TALLY.note(x)


def fills_a_set_anew(x):
    SEEN.clear()
    SEEN.add(float(x.sum()))


def adds_deep_in_a_long_list(x):
    USAGE["usage"][3] += 1.0


def draws_and_logs(x):
    LOGGER.debug("%s", GENERATOR.gauss(0, 1) + random.gauss(0, 1))


def reads(x):
    return KEPT["of"] + len(LISTED) + COUNTED + LAST.sum() + SETTINGS.temperature + str(MASKS).count("a")


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lists, "LISTED"), (calls_a_helper, "KEPT"), (counts, "COUNTED"), (writes_in_place, "LAST"),
        (goes_round, "ROWS"), (sets_a_field, "SETTINGS.temperature"), (sets_within_a_comprehension, "SETTINGS.seen"),
        (sets_a_new_field_that_is_trained, "SETTINGS.aside"), (lists_under_a_name, "LISTS"),
        (writes_into_a_row, "LISTS"), (is_decorated, "LISTED"),
        (adds_by_a_static_method, "ROWS"), (notes_by_a_method, "KEPT"),
        (fills_a_set_anew, "SEEN"), (adds_deep_in_a_long_list, "USAGE"),
        (calls_another_file, "ROWS"), (sets_a_variable_of_another_file, "LAST"), (adds_to_a_class, "Settings.total"),
        (counts_its_calls, "counts_its_calls.num"), (keeps_what_is_trained, "MASKS"), (keeps_a_mask, None),
        (makes_a_mask_late, None), (draws_and_logs, None), (reads, None),
    ],
)  # fmt: skip
def test_what_a_call_changes_outside_is_named(act, name):
    MASKS.clear()
    model = Model(act)
    state = OutsideState(model)
    before = state.seen()
    model(torch.rand(2))
    assert state.changed(before) == ([name] if name else [])


def test_what_was_not_there_is_noticed_at_the_second_call():
    model = Model(sets_what_was_not_there)
    state = OutsideState(model)
    found = []
    for x in torch.rand(2, 3):
        before = state.seen()
        model(x)
        found.append(state.changed(before))
    assert found == [[], ["NOT_THERE"]]


def test_attributes_of_its_class_are_outside():
    class Counting(nn.Module):
        num = 0

        def forward(self, x):
            type(self).num += 1

    model = Counting()
    state = OutsideState(model)
    before = state.seen()
    model(torch.rand(2))
    assert state.changed(before) == ["Counting.num"]


def test_closures_are_seen_as_well():
    last = {"loss": 1.0}

    class Kept(nn.Module):
        def forward(self, x):
            last["loss"] = float(x.sum())

    model = Kept()
    state = OutsideState(model)
    before = state.seen()
    model(torch.rand(2))
    assert state.changed(before) == ["last"]


def test_objects_that_raise_are_left_alone():
    class Odd:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    odd = Odd()
    model = Model(lambda x: x if odd is None else -x)
    state = OutsideState(model)
    before = state.seen()
    model(torch.rand(2))
    assert state.changed(before) == []


def test_modules_of_pytorch_have_nothing_outside():
    model = nn.Transformer(8, 2, 1, 1, 8)
    state = OutsideState(model)
    assert state.changed(state.seen()) == [] and state.seen() == []
