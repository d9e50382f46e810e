"""Do the model's outputs have the values that plain gives them?

Replays are given the gradients that came back in the script, so what is wrong with an output's value shows in no
gradient: the loss would be wrong, and all else that the script makes of the output. Floats are measured as gradients
are, in units of what one unit in the last place of every number that goes in does to them. Whole numbers (classes,
masks, counts) have no size: they have to be equal, except in as many places as change in plain itself where what goes
in moves as far as is believed to be rounding. In: replays of the same calls. Out: a `Difference` of check `outputs`,
or what is wrong with whole numbers, in words. Loaded in trials only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.differences import Apart, outputs_apart, whole_error
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer
from flatout.frameworks.pytorch.numerics.rounding import SLOW_S, Scales, epsilon_of, shaken
from flatout.judge import agreement
from flatout.records.difference import Difference

NUM_SHAKES = 8
"""Replays that show which whole numbers may change; one at a tie changes in about half of them."""

FEW_SHAKES = 2
"""The same where a replay takes long."""


def compared_outputs(found: Replayed, plain: Replayed, again: Sequence[Apart]) -> Difference:
    """Outputs of one replay against plain's; `again` is a second plain replay's beside the first's."""
    apart = outputs_apart(found.outputs, plain.outputs)
    errors = [whole_error([a]) for a in apart]
    furthest = max(range(len(errors)), key=lambda n: math.inf if math.isnan(errors[n]) else errors[n], default=None)
    size2, product = math.fsum(a.size**2 for a in apart), sum(a.product for a in apart)
    norms = math.sqrt(size2) * math.hypot(*(a.own_size for a in apart))
    return Difference(
        check="outputs",
        error=whole_error(apart),
        slope=product / size2 if size2 > 0 else 1.0,
        cosine=product / norms if norms > 0 else 1.0,
        baseline_error=whole_error(again),
        worst="" if furthest is None else plain.output_names[furthest],
        worst_error=0.0 if furthest is None else errors[furthest],
        finite=all(math.isfinite(a.own_size) for a in apart),
    )


def outputs_beside_rounding(outputs: Difference, found: Replayed, plain: Replayed, scales: Scales) -> Difference:
    """How the outputs' error compares with what rounding does to them."""
    distances = [a.distance for a in outputs_apart(found.outputs, plain.outputs)]
    number, multiple = _furthest(distances, scales.outputs)
    named = "" if number is None else plain.output_names[number]
    return dataclasses.replace(outputs, rounding=scales.outputs_relative, multiple=multiple, multiple_of=named)


def outputs_beside_truth(
    outputs: Difference, found: Replayed, plain: Replayed, truth: Replayed, scales: Scales
) -> Difference:
    """How far plain's and the lever's outputs are from float64."""
    ours, theirs = (outputs_apart(one.outputs, truth.outputs) for one in (found, plain))
    units = [max(a.distance, unit) for a, unit in zip(theirs, scales.outputs, strict=False)]
    return dataclasses.replace(
        outputs,
        truth_error=whole_error(ours),
        baseline_truth_error=whole_error(theirs),
        truth_multiple=_furthest([a.distance for a in ours], units)[1],
    )


def _furthest(distances: Sequence[float], units: Sequence[float]) -> tuple[int | None, float]:
    """Which distance is the largest multiple of its unit, and that multiple."""
    furthest: tuple[int | None, float] = (None, 0.0)
    for number, (distance, unit) in enumerate(zip(distances, units, strict=False)):
        multiple = distance / unit if unit > 0 else (math.inf if distance > 0 else 0.0)
        if not multiple <= furthest[1]:  # NaN as well
            furthest = number, multiple
    return furthest


# -- whole numbers -------------------------------------------------------------------------------------------------


def places_changed(found: Replayed, plain: Replayed) -> list[torch.Tensor]:
    """For each output of whole numbers, where it is another one."""
    return [
        other != value if other.shape == value.shape else torch.ones_like(value, dtype=torch.bool)
        for (_, other), (_, value) in zip(found.integers, plain.integers, strict=False)
    ]


def integers_fault(
    changed: Sequence[torch.Tensor], believed: Sequence[Sequence[torch.Tensor]], names: Sequence[str]
) -> str:
    """What is wrong with whole numbers that are others in `changed` places; in `believed` replays they may be so."""
    for number, (places, name) in enumerate(zip(changed, names, strict=False)):
        num = int(places.sum())
        ties = torch.zeros_like(places)
        for other in believed:
            ties |= other[number]
        if num > int(ties.sum()):
            told = f", where rounding changes {int(ties.sum())}" if believed else ""
            return f"whole numbers in the output `{name}` are others in {num} of {places.numel()} places{told}"
    return ""


def ties(replayer: Replayer, calls: Sequence[CapturedCall], plain: Replayed, class_: str) -> list[list[torch.Tensor]]:
    """Places in which plain's whole numbers change where what goes in moves as far as is believed to be rounding.

    That is as many roundings as gradients and outputs may be off, and never more than in class precision.
    """
    coarsest = agreement.most_roundings("outputs", "precision") * torch.finfo(torch.bfloat16).eps
    own = max((epsilon_of(call) for call in calls), default=0.0)
    believed = coarsest if class_ != "rounding" else min(coarsest, agreement.most_roundings("outputs", class_) * own)
    num = FEW_SHAKES if plain.took_s > SLOW_S else NUM_SHAKES
    return [places_changed(replayer.run(shaken(calls, seed, believed)), plain) for seed in range(num)]
