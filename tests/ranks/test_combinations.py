"""What one process trains, groups of ranks train that share the batch, each of which shares the model."""

from __future__ import annotations

import pytest
import torch

from tiers import some

from . import pipeline_scenarios, scenarios, sharded_scenarios, tensor_scenarios
from .on_ranks import on_ranks
from .test_shard import agrees

BOTH = (
    scenarios.sgd_with_momentum, scenarios.adam, scenarios.a_last_batch_of_one, scenarios.a_sum_as_loss,
    scenarios.targets_that_are_ignored, scenarios.gradients_of_inputs, scenarios.a_part_that_is_not_used,
    scenarios.texts_of_many_lengths, sharded_scenarios.checkpoints_of_everything,
    tensor_scenarios.blocks_of_a_user, pipeline_scenarios.a_language_model_that_returns_its_loss,
    pipeline_scenarios.an_encoder_and_a_decoder,
)  # fmt: skip


@pytest.mark.parametrize("mode", ["replicate+tensor", "replicate+pipeline"])
@pytest.mark.parametrize(
    "scenario", some(BOTH, tensor_scenarios.blocks_of_a_user), ids=lambda scenario: scenario.__name__
)
def test_two_groups_of_two_end_where_one_process_ends(scenario, mode):
    agrees(scenario, 4, mode)


@pytest.mark.parametrize("mode", ["replicate+tensor", "replicate+pipeline"])
def test_masks_of_dropout_are_other_ones_and_ranks_stay_together(mode):
    first, *others = on_ranks(4, scenarios.masks_of_dropout, mode)
    for other in others:
        assert first.said == other.said
        assert first.drawn == other.drawn
        assert all(torch.equal(a, b) for a, b in zip(first.state, other.state, strict=True))
