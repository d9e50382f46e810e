"""What a model changes outside of itself is noticed; what it only keeps for itself, and what it reads, is not."""

from collections import deque

import pytest
import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.outside_state import OutsideState

LISTED, KEPT, COUNTED, MASKS = [], {"of": 0.5}, 0, {}
LAST = torch.zeros(2)
ROWS = deque(maxlen=2)


class Settings:
    def __init__(self):
        self.temperature, self.seen = 1.0, []


SETTINGS = Settings()


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


def keeps_what_is_trained(x):
    MASKS["trained"] = x.requires_grad_()


def keeps_a_mask(x):
    MASKS.setdefault(len(x), torch.ones(len(x)))


def reads(x):
    return KEPT["of"] + len(LISTED) + COUNTED + LAST.sum() + SETTINGS.temperature + str(MASKS).count("a")


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lists, "LISTED"), (calls_a_helper, "KEPT"), (counts, "COUNTED"), (writes_in_place, "LAST"),
        (goes_round, "ROWS"), (sets_a_field, "SETTINGS"), (sets_within_a_comprehension, "SETTINGS"),
        (keeps_what_is_trained, "MASKS"), (keeps_a_mask, None), (reads, None),
    ],
)  # fmt: skip
def test_what_a_call_changes_outside_is_named(act, name):
    MASKS.clear()
    model = Model(act)
    state = OutsideState(model)
    before = state.seen()
    model(torch.rand(2))
    assert state.changed(before) == ([name] if name else [])


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


def test_modules_of_pytorch_have_nothing_outside():
    model = nn.Transformer(8, 2, 1, 1, 8)
    state = OutsideState(model)
    assert state.changed(state.seen()) == [] and state.seen() == []
