"""What one process trains, ranks train that hold some rows of each parameter; to the script they are whole."""

from __future__ import annotations

import pytest

from tiers import some

from . import scenarios, sharded_scenarios
from .on_ranks import alone, on_ranks
from .test_replicate import FURTHEST, distance


def agrees(scenario, world, mode):
    wanted = alone(scenario)
    for found in on_ranks(world, scenario, mode):
        assert found.said == wanted.said
        assert distance(found.state, wanted.state) <= FURTHEST
        assert found.drawn == wanted.drawn


@pytest.mark.parametrize(
    "scenario", some([*scenarios.SAME, *sharded_scenarios.SAME], scenarios.adam), ids=lambda scenario: scenario.__name__
)
def test_ranks_that_share_parameters_end_where_one_process_ends(scenario):
    agrees(scenario, 3, "shard")  # an uneven share of rows, and of batches


HYBRID = (scenarios.adam, scenarios.two_models_against_each_other, *sharded_scenarios.SAME[:3])


@pytest.mark.parametrize("scenario", some(HYBRID, scenarios.adam), ids=lambda scenario: scenario.__name__)
def test_pairs_of_ranks_that_share_parameters_end_where_one_process_ends(scenario):
    agrees(scenario, 4, "hybrid")


def test_what_is_refused_on_the_way_back_is_no_divergence():
    for found in on_ranks(2, scenarios.a_small_part_that_sees_all_samples, "shard"):
        assert scenarios.REFUSED[scenarios.a_small_part_that_sees_all_samples] in found["cause"]


@pytest.mark.parametrize("scenario", sharded_scenarios.REFUSED, ids=lambda scenario: scenario.__name__)
def test_what_cannot_be_done_with_rows_is_refused_with_its_reason(scenario):
    for found in on_ranks(2, scenario, "shard"):
        assert sharded_scenarios.REFUSED[scenario] in found["cause"]
        assert found["error"] and "--mode replicate" in found["hint"]
