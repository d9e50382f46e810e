"""Gradients in several buckets, or sent as bfloat16: ranks train what one process trains, and all of them the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from . import scenarios
from .on_ranks import alone, on_ranks
from .test_replicate import FURTHEST, distance

FURTHEST_OF_BF16 = 3e-3
"""Relative to the norm of all state, after some steps at a high learning rate: a gradient is rounded to 1 in 512, which
moved it by 0.0014 at most."""

FURTHEST_OF_BF16_UNDER_ADAM = 1e-2
"""Its first steps are as long for a gradient that is nearly zero, whose shares cancel but for their rounding: 0.005."""

SMALL_BUCKETS = (64, 64)
"""Bytes: less than a layer's weights, so that any model has several."""

SCENARIOS = (
    scenarios.adam,
    scenarios.accumulated_gradients,
    scenarios.a_part_that_is_not_used,
    scenarios.a_part_that_some_samples_use,
    scenarios.a_part_that_is_frozen_now_and_then,
    scenarios.convolutions,
    scenarios.gradients_of_inputs,
    scenarios.a_part_that_is_computed_again,
    scenarios.two_models_against_each_other,
)


def named(scenario):
    return scenario.__name__


def all_alike(found):
    first, *others = found
    return all(torch.equal(a, b) for other in others for a, b in zip(first.state, other.state, strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
def test_the_size_of_buckets_changes_rounding_alone(scenario):
    wanted = alone(scenario)
    found = on_ranks(3, scenario, bucket_bytes=SMALL_BUCKETS)
    for one in found:
        assert one.said == wanted.said and one.drawn == wanted.drawn
        assert distance(one.state, wanted.state) <= FURTHEST
    assert all_alike(found)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
def test_bf16_gradients_train_the_same_but_for_their_rounding_on_all_ranks_alike(scenario):
    wanted = alone(scenario)
    found = on_ranks(3, scenario, in_bf16=True)  # a world that is no power of two
    for one in found:
        assert one.drawn == wanted.drawn
        most = FURTHEST_OF_BF16_UNDER_ADAM if scenario is scenarios.adam else FURTHEST_OF_BF16
        assert 0 < distance(one.state, wanted.state) <= most
        assert one.communication.num_sent_bytes * 2 == one.communication.num_bytes > 0
    assert all_alike(found)


@pytest.mark.parametrize("mode", ["shard", "hybrid", "replicate+tensor", "replicate+pipeline"])
def test_bf16_gradients_are_summed_where_ranks_share_parameters(mode):
    scenario = two_layers
    wanted = alone(scenario)
    found = on_ranks(4, scenario, mode, in_bf16=True)
    for one in found:
        assert 0 < distance(one.state, wanted.state) <= FURTHEST_OF_BF16
        assert one.communication.num_sent_bytes * 2 == one.communication.num_bytes > 0
    assert all_alike(found)


@pytest.mark.smoke
def test_bf16_gradients_of_three_ranks_that_share_rows_are_divided_in_float32():
    wanted = alone(two_layers)
    found = on_ranks(3, two_layers, "shard", in_bf16=True)
    assert 0 < distance(found[0].state, wanted.state) <= FURTHEST_OF_BF16 and all_alike(found)


@pytest.mark.smoke
def test_gradients_that_are_not_float32_are_sent_as_they_are():
    wanted = alone(in_double)
    for one in on_ranks(2, in_double, in_bf16=True):
        assert distance(one.state, wanted.state) <= 1e-12 and not one.communication.num_sent_bytes


@pytest.mark.parametrize("mode", ["replicate+tensor", "replicate+pipeline"])
def test_groups_of_ranks_sum_in_several_buckets(mode):
    wanted = alone(two_layers)
    for one in on_ranks(4, two_layers, mode, bucket_bytes=SMALL_BUCKETS):
        assert distance(one.state, wanted.state) <= FURTHEST


def two_layers() -> scenarios.Trained:
    torch.manual_seed(3)
    return scenarios.trained(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)))


def in_double() -> scenarios.Trained:
    return scenarios.trained(scenarios.mlp().double(), lambda model, x, y: scenarios.entropy(model, x.double(), y))
