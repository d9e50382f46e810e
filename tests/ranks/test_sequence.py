"""Blocks compute with some positions on each rank, between layers that are divided by features."""

from __future__ import annotations

import pytest
import torch

from . import sequence_scenarios
from .on_ranks import on_ranks
from .test_shard import agrees


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("scenario", sequence_scenarios.SAME, ids=lambda scenario: scenario.__name__)
def test_ranks_that_share_positions_end_where_one_process_ends(scenario, world):
    agrees(scenario, world, "tensor")


@pytest.mark.parametrize("world", [2, 3])
def test_all_blocks_are_found_to_be_one_region(world):
    for found in on_ranks(world, sequence_scenarios.blocks_that_are_divided, "tensor"):
        assert found.said == [3]


def test_masks_within_blocks_are_ranks_own_and_ranks_stay_together():
    first, second = on_ranks(2, sequence_scenarios.dropout_within_blocks, "tensor")
    assert first.said == second.said
    assert first.drawn == second.drawn
    assert all(torch.equal(a, b) for a, b in zip(first.state, second.state, strict=True))


def test_groups_of_ranks_share_positions_too():
    agrees(sequence_scenarios.blocks_of_words, 4, "replicate+tensor")
