"""What does the error of a replayed gradient not tell? Whether rounding explains it, and what is wrong beside it.

Beside the error stand: the outputs' own, how far rounding alone moves each parameter's gradient and each output, how
far plain and lever are from float64, NaN at rare inputs, outputs of other types, gradients that are not cleared or do
not add up. In: the captured step, its plain replays, its replay under levers. Out: `Difference`s with these filled in.
Loaded in trials only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from flatout.frameworks.pytorch.numerics.accumulation import Accumulation
from flatout.frameworks.pytorch.numerics.capture import Capture, CapturedCall
from flatout.frameworks.pytorch.numerics.differences import Gradients, outputs_apart, relative_error, square
from flatout.frameworks.pytorch.numerics.edges import finite_at, rare_inputs
from flatout.frameworks.pytorch.numerics.elsewhere import Elsewhere, inputs_fault
from flatout.frameworks.pytorch.numerics.outputs import (
    compared_outputs,
    integers_fault,
    outputs_beside_rounding,
    outputs_beside_truth,
    places_changed,
    ties,
)
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer
from flatout.frameworks.pytorch.numerics.rounding import SLOW_S, Scales, rounding_scales
from flatout.frameworks.pytorch.numerics.truth import true_step
from flatout.judge import agreement
from flatout.records.difference import Difference

Name = Callable[[torch.Tensor | None], str]


class CloserLook:
    """Made while nothing is engaged, so that it knows what plain does; asked under levers, then without them."""

    def __init__(self, replayer: Replayer, capture: Capture, first: Replayed, again: Replayed) -> None:
        self._replayer = replayer
        self._calls: Sequence[CapturedCall] = capture.present
        self._first = first
        self._outputs_again = outputs_apart(again.outputs, first.outputs)
        self._integers_again = places_changed(again, first)
        self._truth: Replayed | str | None = None
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

    def outputs(self, changed: Replayed) -> Difference:
        """The outputs' own error."""
        return compared_outputs(changed, self._first, self._outputs_again)

    def integers_fault(self, changed: Replayed, class_: str) -> str:
        """What is wrong with outputs of whole numbers; empty where nothing is."""
        places = places_changed(changed, self._first)
        if not any(bool(p.any()) for p in places):
            return ""
        believed = [self._integers_again] if any(bool(p.any()) for p in self._integers_again) else []
        if class_ != "exact":
            believed += ties(self._replayer, self._calls, self._first, class_)
        return integers_fault(places, believed, [name for name, _ in self._first.integers])

    def beside_rounding(
        self, found: Difference, outputs: Difference, changed: Replayed, name: Name, class_: str
    ) -> tuple[Difference, Difference]:
        """How both errors compare with what rounding does, and, where that does not explain one, with the truth."""
        plain = self._first
        if found.error == outputs.error == 0 or changed.gradients.keys() != plain.gradients.keys():
            return found, outputs
        epsilon = torch.finfo(torch.bfloat16).eps if class_ != "rounding" else 0.0
        scales = rounding_scales(self._replayer, self._calls, plain, epsilon)
        if found.error != 0:
            found = self._gradients_beside(found, changed, scales, name, class_)
        if outputs.error != 0:
            outputs = outputs_beside_rounding(outputs, changed, plain, scales)
            if _needs_truth(outputs, class_):
                truth = self._true()
                if isinstance(truth, Replayed):
                    outputs = outputs_beside_truth(outputs, changed, plain, truth, scales)
        return found, outputs

    def _gradients_beside(
        self, found: Difference, changed: Replayed, scales: Scales, name: Name, class_: str
    ) -> Difference:
        owner, multiple = scales.worst(changed, self._first)
        named = owner[1] if isinstance(owner, tuple) else name(owner)
        found = dataclasses.replace(found, rounding=scales.relative, multiple=multiple, multiple_of=named)
        if isinstance(owner, tuple) and not multiple <= agreement.most_roundings("gradients", class_):
            return found  # a buffer, of which the truth is not looked at
        return self._beside_truth(found, changed.gradients, scales) if _needs_truth(found, class_) else found

    def _true(self) -> Replayed | str:
        if self._truth is None:
            self._truth = true_step(self._replayer, self._calls, self._first)
        return self._truth

    def _beside_truth(self, found: Difference, changed: Gradients, scales: Scales) -> Difference:
        plain, truth = self._first.gradients, self._true()
        if isinstance(truth, str):
            return dataclasses.replace(found, detail="; ".join(filter(None, (found.detail, f"no truth: {truth}"))))
        return dataclasses.replace(
            found,
            truth_error=relative_error(changed, truth.gradients),
            baseline_truth_error=relative_error(plain, truth.gradients),
            truth_multiple=_truth_multiple(changed, plain, truth.gradients, scales),
        )


def _needs_truth(found: Difference, class_: str) -> bool:
    """Whether rounding alone does not explain an error, so that float64 has to tell."""
    beyond = found.multiple is None or not found.multiple <= agreement.most_roundings(found.check, class_)
    large = class_ == "rounding" and found.error > agreement.ROUNDING_ERROR
    return beyond or large or not abs(found.slope - 1) <= agreement.SLOPE_ERROR


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
