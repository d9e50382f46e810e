"""What one process trains, ranks train that each compute some features of every layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.tensor_plan import TensorPlan, Watched
from tiers import some

from . import scenarios, sharded_scenarios, tensor_scenarios
from .on_ranks import alone, on_ranks
from .test_shard import agrees

OUTSIDE = {one: why for one, why in scenarios.REFUSED.items() if "outside of it" in why or "hook" in why}
OTHERWISE = (
    scenarios.words_updated_by_hand, scenarios.a_critic_that_is_kept_from_training,
    sharded_scenarios.heads_that_take_turns,
)  # fmt: skip
"""Refused: nothing but a recurrent layer and small ones (twice); another way through the layers than at first."""

SCENARIOS = [one for one in (*scenarios.SAME, *sharded_scenarios.SAME) if one not in OTHERWISE]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_ranks_that_share_layers_end_where_one_process_ends(scenario):
    agrees(scenario, 2, "tensor")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "scenario", some(tensor_scenarios.SAME, tensor_scenarios.blocks_of_a_user), ids=lambda scenario: scenario.__name__
)
def test_attention_and_pairs_are_divided_evenly_or_not(scenario, world):
    agrees(scenario, world, "tensor")


@pytest.mark.parametrize("scenario", OTHERWISE, ids=lambda scenario: scenario.__name__)
def test_what_cannot_be_divided_by_features_is_refused_with_its_reason(scenario):
    alone(scenario)
    for found in on_ranks(2, scenario, "tensor"):
        assert "layers" in found["cause"]
        assert found["error"]


@pytest.mark.parametrize("scenario", OUTSIDE, ids=lambda scenario: scenario.__name__)
def test_variables_outside_and_hooks_are_refused_by_name(scenario):
    for found in on_ranks(2, scenario, "tensor"):
        assert OUTSIDE[scenario] in found["cause"]


class TwoRanks:
    """A group that is alone, and takes itself for the first of two: its sums are those of whole layers."""

    rank, world = 0, 2

    def everywhere(self, holds: bool, name: str) -> bool:
        """On this rank."""
        return holds

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Of halves that were given to it."""
        return tensor


@pytest.mark.smoke
@pytest.mark.parametrize("num", [1, 2])
def test_a_pair_is_found_only_where_nothing_else_sees_its_features(num):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).relu()
            with torch.no_grad():
                h[..., 8:] = 0  # so that half of the features is all there is
            out = self.last(h)
            return out if num == 1 else out + h[..., 4:12]

    module, x = Pair(), torch.randn(4, 8)
    watched = Watched(module)
    watched.watch(module, (x,), {})
    plan = TensorPlan(watched, TwoRanks(), lambda problem: None)
    plan.find()
    assert [layer.kind for layer in plan.together] == (["columns", "row"] if num == 1 else [])
