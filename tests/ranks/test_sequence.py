"""Blocks compute with some positions on each rank, between layers that are divided by features."""

from __future__ import annotations

import pytest
import torch

from tiers import some

from . import scenarios, sequence_scenarios
from .on_ranks import on_ranks
from .test_shard import agrees


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "scenario",
    some(sequence_scenarios.SAME, sequence_scenarios.blocks_of_words),
    ids=lambda scenario: scenario.__name__,
)
def test_ranks_that_share_positions_end_where_one_process_ends(scenario, world):
    agrees(scenario, world, "tensor+sequence")


def test_samples_are_divided_where_heads_cannot_be():
    agrees(sequence_scenarios.blocks_of_words, 3, "tensor+sequence")


@pytest.mark.parametrize("world", [2, 3])
def test_all_blocks_are_found_to_be_one_region(world):
    for found in on_ranks(world, sequence_scenarios.blocks_that_are_divided, "tensor+sequence"):
        assert found.said == [3]


def test_masks_within_blocks_are_ranks_own_and_ranks_stay_together():
    first, second = on_ranks(2, sequence_scenarios.dropout_within_blocks, "tensor+sequence")
    assert first.said == second.said
    assert first.drawn == second.drawn
    assert all(torch.equal(a, b) for a, b in zip(first.state, second.state, strict=True))


def test_a_model_without_sequences_is_refused_with_its_reason():
    for found in on_ranks(2, scenarios.masks_of_dropout, "tensor+sequence"):
        assert "positions" in found["error"]
        assert "--mode tensor" in found["hint"]
