"""What does the error of a replayed gradient not tell? Whether rounding explains it, and what is wrong beside it.

Beside the error stand: how far rounding alone moves each parameter's gradient, how far plain and lever are from
float64, NaN at rare inputs, outputs of other types, gradients that are not cleared or do not add up. In: the captured
step, its plain replay, its replay under levers. Out: a `Difference` with these filled in. Loaded in trials only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from flatout import agreement
from flatout.difference import Difference
from flatout.frameworks.pytorch.accumulation import Accumulation
from flatout.frameworks.pytorch.capture import Capture, CapturedCall
from flatout.frameworks.pytorch.differences import Gradients, relative_error, square
from flatout.frameworks.pytorch.edges import finite_at, rare_inputs
from flatout.frameworks.pytorch.elsewhere import Elsewhere, inputs_fault
from flatout.frameworks.pytorch.replay import Replayed, Replayer
from flatout.frameworks.pytorch.rounding import SLOW_S, Scales, rounding_scales
from flatout.frameworks.pytorch.truth import true_gradients

Name = Callable[[torch.Tensor | None], str]


class CloserLook:
    """Made while nothing is engaged, so that it knows what plain does; asked under levers, then without them."""

    def __init__(self, replayer: Replayer, capture: Capture, first: Replayed) -> None:
        self._replayer = replayer
        self._calls: Sequence[CapturedCall] = capture.present
        self._first = first
        self._accumulation = Accumulation(replayer, self._calls, capture.clearings)
        self._rare = rare_inputs(replayer, self._calls) if first.took_s <= SLOW_S else []
        self._elsewhere = Elsewhere(replayer, self._calls, first) if first.took_s <= SLOW_S else None

    def fault(self, changed: Replayed) -> str:
        """What is wrong under the engaged levers, whatever the error; empty where nothing is."""
        if changed.kinds != self._first.kinds:
            return _other_kind(changed, self._first)
        if changed.settings != self._first.settings:
            return "what follows the model is computed under other settings (autocast, default type)"
        if changed.finite and not finite_at(self._replayer, self._rare):
            return "NaN or infinity at rare inputs (an example of zeros, a large one) at which plain has none"
        if fault := inputs_fault(changed, self._first):
            return fault
        if self._elsewhere is not None and (fault := self._elsewhere.fault(changed)):
            return fault
        return self._accumulation.fault(changed)

    def beside_rounding(self, found: Difference, changed: Replayed, name: Name, class_: str) -> Difference:
        """How the error compares with what rounding does, and, where that does not explain it, with the truth."""
        plain = self._first
        if found.error == 0 or changed.gradients.keys() != plain.gradients.keys():
            return found
        epsilon = torch.finfo(torch.bfloat16).eps if class_ != "rounding" else 0.0
        scales = rounding_scales(self._replayer, self._calls, plain, epsilon)
        owner, multiple = scales.worst(changed, plain)
        named = owner[1] if isinstance(owner, tuple) else name(owner)
        found = dataclasses.replace(found, rounding=scales.relative, multiple=multiple, multiple_of=named)
        beyond = not multiple <= agreement.most_roundings("gradients", class_)
        large = class_ == "rounding" and found.error > agreement.ROUNDING_ERROR
        if isinstance(owner, tuple) and beyond:  # a buffer, of which the truth is not looked at
            return found
        return self._beside_truth(found, changed.gradients, scales) if beyond or large or _scaled(found) else found

    def _beside_truth(self, found: Difference, changed: Gradients, scales: Scales) -> Difference:
        plain, truth = self._first.gradients, true_gradients(self._replayer, self._calls, self._first)
        if isinstance(truth, str):
            return dataclasses.replace(found, detail="; ".join(filter(None, (found.detail, f"no truth: {truth}"))))
        return dataclasses.replace(
            found,
            truth_error=relative_error(changed, truth),
            baseline_truth_error=relative_error(plain, truth),
            truth_multiple=_truth_multiple(changed, plain, truth, scales),
        )


def _scaled(found: Difference) -> bool:
    return not abs(found.slope - 1) <= agreement.SLOPE_ERROR


def _truth_multiple(found: Gradients, plain: Gradients, truth: Gradients, scales: Scales) -> float:
    """The largest distance of one parameter from the truth, in distances of plain or in what rounding moves."""
    furthest = 0.0
    for parameter, true in truth.items():
        own = math.sqrt(square(plain[parameter].double() - true))
        distance = math.sqrt(square(found[parameter].double() - true))
        scale = max(own, scales.of(parameter))
        multiple = distance / scale if scale > 0 else (math.inf if distance > 0 else 0.0)
        if not multiple <= furthest:  # NaN as well
            furthest = multiple
    return furthest


def _other_kind(changed: Replayed, first: Replayed) -> str:
    for (dtype, shape), (plain_dtype, plain_shape) in zip(changed.kinds, first.kinds, strict=False):
        if dtype != plain_dtype:
            return f"an output comes as {_short(dtype)} instead of {_short(plain_dtype)}, and so does the loss"
        if shape != plain_shape:
            return f"an output has the shape {list(shape)} instead of {list(plain_shape)}"
    return f"{len(changed.kinds)} outputs instead of {len(first.kinds)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
