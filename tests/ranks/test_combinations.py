"""What one process trains, groups of ranks train that share the batch, each of which shares the model."""

from __future__ import annotations

import pytest

from tiers import some

from . import pipeline_scenarios, scenarios, sharded_scenarios, tensor_scenarios
from .test_shard import agrees

BOTH = (
    scenarios.sgd_with_momentum, scenarios.adam, scenarios.a_last_batch_of_one,
    scenarios.targets_that_are_ignored, scenarios.a_part_that_is_not_used,
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


def test_gradients_of_inputs_come_from_two_groups_that_share_layers():
    agrees(scenarios.gradients_of_inputs, 4, "replicate+tensor")
