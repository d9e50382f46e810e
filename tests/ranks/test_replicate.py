"""What one process trains, ranks train: the same said, parameters but for rounding, random numbers."""

from __future__ import annotations

import pytest
import torch

from flatout.records.ranks import REPLICATED_MODEL_MODES
from tiers import some

from . import scenarios
from .on_ranks import alone, on_ranks

FURTHEST = 2e-5
"""Relative to the norm of all state; what was measured is below 1e-6, and LBFGS enlarges rounding."""


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    off = sum(float((a - b).double().norm() ** 2) for a, b in zip(found, wanted, strict=True))
    return float((off / sum(float(b.double().norm() ** 2) for b in wanted)) ** 0.5)


@pytest.mark.parametrize(
    "scenario",
    some([*scenarios.SAME, *scenarios.SAME_WHERE_PARAMETERS_ARE_WHOLE], scenarios.adam),
    ids=lambda scenario: scenario.__name__,
)
def test_ranks_end_where_one_process_ends(scenario):
    wanted = alone(scenario)
    for found in on_ranks(3, scenario):  # an uneven share, also of batches that two would divide evenly
        assert found.said == wanted.said
        assert distance(found.state, wanted.state) <= FURTHEST
        assert found.drawn == wanted.drawn


@pytest.mark.smoke
def test_all_ranks_end_with_the_same_bits():
    first, *others = on_ranks(2, scenarios.convolutions)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first.state, other.state, strict=True))


@pytest.mark.parametrize("scenario", scenarios.REFUSED, ids=lambda scenario: scenario.__name__)
def test_what_cannot_be_divided_is_refused_with_its_reason(scenario):
    for found in on_ranks(2, scenario):
        assert scenarios.REFUSED[scenario] in found["cause"]
        assert found["error"] and found["hint"]


@pytest.mark.parametrize("mode", some(["auto", "tensor", "pipeline", *REPLICATED_MODEL_MODES], "tensor"))
@pytest.mark.parametrize(
    "scenario",
    some([scenarios.masks_of_dropout, scenarios.masks_that_are_computed_again], scenarios.masks_of_dropout),
    ids=lambda scenario: scenario.__name__,
)
def test_masks_of_dropout_are_other_ones_on_each_rank_and_ranks_stay_together(scenario, mode):
    plain = alone(scenario)
    first, *others = on_ranks(4 if mode in REPLICATED_MODEL_MODES else 2, scenario, mode)
    for other in others:
        assert first.said == other.said != plain.said
        assert first.drawn == other.drawn
        assert all(torch.equal(a, b) for a, b in zip(first.state, other.state, strict=True))


@pytest.mark.smoke
def test_ranks_that_drift_apart_end_with_an_error():
    for found in on_ranks(2, scenarios.parameters_that_move_on_one_rank):
        assert "ranks have diverged: their parameters" in found["error"]
