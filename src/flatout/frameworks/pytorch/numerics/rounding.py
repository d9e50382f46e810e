"""Does rounding explain how far a replay under levers is from plain's, parameter by parameter and output by output?

The step is replayed with every number that goes into it (parameters, inputs, the gradients that came back for the
outputs) moved by one unit in its last place: what that moves, another order of the same operations may move as well.
Where an error is larger, the step in float64 tells which of both is closer to the truth. In: the captured step, its
plain replay, its replay under levers. Out: `Difference`s with these filled in. Loaded in trials only.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.differences import (
    BufferKey,
    Key,
    apart,
    furthest,
    numbered,
    reals,
    relative_error,
    square,
)
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer, half
from flatout.frameworks.pytorch.numerics.trained import distributed_like, is_distributed
from flatout.frameworks.pytorch.numerics.truth import affordable_s, true_step
from flatout.frameworks.pytorch.seams.trees import map_tensors
from flatout.judge import agreement
from flatout.records.difference import Difference

NUM_SHAKES = 3
"""Replays with moved numbers; of a gradient of few elements one may come back to where it was by chance."""

SLOW_S = 0.5
"""From so long a replay on, one has to do."""

DECIDES_NOTHING = 0.25
"""Units in the last place of the whole gradient below which a parameter's error is not looked at. A bias that batch
statistics take away again has a gradient of nothing but rounding: up to 0.06 of such units were seen in bfloat16."""

LEAST_SHARE = 0.25
"""No parameter or output is taken to be less sensitive than this share of the sensitivity of all together."""

SHRUNK = 1e-3
"""Where lever and plain compute the same, their distance in float64 is at most this share of that in float32; rounding
itself is 2e-9 of it."""

TF32 = 2.0**-10
"""Spacing of floats with 10 bits of mantissa. Source: NVIDIA A100 white paper (2020), as the next."""

FIRST_WITH_TF32 = (8, 0)
"""Compute capability of Ampere."""

Owner = torch.Tensor | BufferKey
"""A parameter, whose gradient is meant, or the key of a buffer."""


class Rounding:
    """What one unit in the last place of all that goes in moves in plain, and errors judged beside that.

    Args:
        replayer: Runs calls again.
        calls: The captured step.
        plain: Its replay.
        class_: The widest class of the levers; beyond `rounding` they compute in bfloat16.
        engage: Engages the levers, or releases them; None where they cannot compute in float64.
    """

    def __init__(
        self,
        replayer: Replayer,
        calls: Sequence[CapturedCall],
        plain: Replayed,
        class_: str,
        engage: Callable[[bool], object] | None = None,
    ) -> None:
        self._replayer, self._calls, self._plain, self._class = replayer, calls, plain, class_
        self._engage = engage
        self._truth: Replayed | str | None = None
        least_epsilon = torch.finfo(torch.bfloat16).eps if class_ != "rounding" else 0.0
        epsilon = max((epsilon_of(call, least_epsilon) for call in calls), default=0.0)
        gradients: dict[Owner, float] = {}
        outputs: dict[int, float] = {}
        for seed in range(1 if plain.took_s > SLOW_S else NUM_SHAKES):
            found = replayer.run(shaken(calls, seed, least_epsilon))
            _note_largest(gradients, _distances(found, plain))
            _note_largest(outputs, _output_distances(found, plain))
        self._of_gradients(gradients, epsilon)
        self._of_outputs(outputs, epsilon)

    def _of_gradients(self, moved: Mapping[Owner, float], epsilon: float) -> None:
        norms = {p: math.sqrt(square(value)) for p, value in self._plain.gradients.items()}
        whole = math.hypot(*norms.values())
        self._relative = math.hypot(*(moved.get(p, 0.0) for p in norms)) / whole if whole > 0 else 0.0
        least = max(torch.finfo(torch.float32).eps, DECIDES_NOTHING * epsilon) * whole if epsilon else 0.0
        self._units: dict[Owner, float] = {
            p: max(moved.get(p, 0.0), LEAST_SHARE * self._relative * norm, least) for p, norm in norms.items()
        }
        for key, (_, after) in self._plain.buffers.items():
            last_place = torch.finfo(after.dtype).eps if after.is_floating_point() else 0.0
            self._units[key] = max(moved.get(key, 0.0), last_place * math.sqrt(square(after.double())))

    def _of_outputs(self, moved: Mapping[int, float], epsilon: float) -> None:
        sizes = {n: a.size for n, a in _outputs_apart(self._plain, self._plain).items()}
        whole = math.hypot(*sizes.values())
        self._outputs_relative = math.hypot(*moved.values()) / whole if whole > 0 else 0.0
        eps = {n: max(epsilon, torch.finfo(value.dtype).eps) for n, value in enumerate(self._plain.outputs)}
        self._output_units = {
            n: max(moved.get(n, 0.0), LEAST_SHARE * self._outputs_relative * size, eps[n] * size)
            for n, size in sizes.items()
        }

    def of_gradients(
        self, found: Difference, changed: Replayed, name: Callable[[torch.Tensor | None], str]
    ) -> Difference:
        """How the gradients' error compares with rounding, and, where that does not explain it, with the truth."""
        if found.error == 0:
            return found
        owner, multiple = furthest(_distances(changed, self._plain), self._units)
        named = owner[1] if isinstance(owner, tuple) else name(owner)
        found = dataclasses.replace(found, rounding=self._relative, multiple=multiple, multiple_of=named)
        if self.is_beyond(found):
            found = dataclasses.replace(found, same_in_float64=self._is_same(_distances, self._units, multiple))
        if isinstance(owner, tuple) and self.is_beyond(found):
            return found  # a buffer, whose distance from the truth says nothing of the whole
        if not self._needs_truth(found):
            return found
        truth = self._true()
        if isinstance(truth, str):
            return dataclasses.replace(found, detail="; ".join(filter(None, (found.detail, f"no truth: {truth}"))))
        sides = (changed.gradients, self._plain.gradients, truth.gradients)
        return _beside_truth(found, sides, {p: self._units[p] for p in truth.gradients})

    def of_outputs(self, found: Difference, changed: Replayed) -> Difference:
        """The same of the outputs' error."""
        if found.error == 0:
            return found
        distances = {n: d for n, d in _output_distances(changed, self._plain).items() if n in self._output_units}
        number, multiple = furthest(distances, self._output_units)
        named = "" if number is None else self._plain.output_names[number]
        found = dataclasses.replace(found, rounding=self._outputs_relative, multiple=multiple, multiple_of=named)
        if self.is_beyond(found):
            same = self._is_same(_output_distances, self._output_units, multiple)
            found = dataclasses.replace(found, same_in_float64=same)
        truth = self._true() if self._needs_truth(found) else ""
        if isinstance(truth, str):
            return found
        sides = (numbered(changed.outputs), numbered(self._plain.outputs), numbered(truth.outputs))
        return _beside_truth(found, sides, self._output_units, masks=True)

    def _needs_truth(self, found: Difference) -> bool:
        """Whether rounding alone does not explain an error, so that float64 has to tell."""
        large = self._class == "rounding" and found.error > agreement.ROUNDING_ERROR
        return (
            found.multiple is None
            or self.is_beyond(found)
            or large
            or not abs(found.slope - 1) <= agreement.SLOPE_ERROR
        )

    def is_beyond(self, found: Difference) -> bool:
        """Whether an error is more than rounding can be."""
        return found.multiple is not None and not found.multiple <= agreement.most_roundings(found.check, self._class)

    def _is_same(self, distances: Any, units: Mapping[Any, float], multiple: float) -> bool:
        """Whether in float64 the levers are nearer to plain by as much as rounding is smaller there."""
        if self._class != "rounding" or not multiple <= agreement.SAME_IN_FLOAT64 * agreement.ROUNDINGS:
            return False
        if self._in_float64 is None:
            return False
        plain, changed = self._in_float64
        return furthest(distances(changed, plain), units)[1] <= SHRUNK * multiple

    @cached_property
    def _in_float64(self) -> tuple[Replayed, Replayed] | None:
        """The step in float64, plain and under the levers, of as much of the batch as is affordable."""
        if self._engage is None:
            return None
        calls, took_s = list(self._calls), self._plain.took_s
        most_s = affordable_s(calls) / 2
        while took_s > most_s:
            halves = [one for one in map(half, calls) if one is not None]
            if len(halves) < len(calls):
                return None
            calls, took_s = halves, took_s / 2
        if took_s == self._plain.took_s:  # the whole batch, of which that is known
            narrow, plain = self._plain, self._true()
        else:
            narrow = self._replayer.run(calls)
            plain = true_step(self._replayer, calls, narrow)
        if isinstance(plain, str):
            return None
        try:
            self._engage(True)
            changed = true_step(self._replayer, calls, narrow, levers=True)
        finally:
            self._engage(False)
        return None if isinstance(changed, str) else (plain, changed)

    def _true(self) -> Replayed | str:
        if self._truth is None:
            self._truth = true_step(self._replayer, self._calls, self._plain)
        return self._truth


def _note_largest(largest: dict[Key, float], distances: Mapping[Key, float]) -> None:
    for key, distance in distances.items():
        largest[key] = max(largest.get(key, 0.0), distance)


def _distances(found: Replayed, plain: Replayed) -> dict[Owner, float]:
    """How far each gradient of a parameter, and each buffer, lies from plain's; of what both have."""
    distances: dict[Owner, float] = {}
    for key, a in apart(found.gradients, plain.gradients).items():
        if key in found.gradients and key in plain.gradients:
            distances[key] = a.distance
    buffers = [{key: after for key, (_, after) in one.buffers.items()} for one in (found, plain)]
    return distances | {
        key: a.distance for key, a in apart(*buffers).items() if key in buffers[0] and key in buffers[1]
    }


def _output_distances(found: Replayed, plain: Replayed) -> dict[int, float]:
    return {n: a.distance for n, a in _outputs_apart(found, plain).items()}


def _outputs_apart(found: Replayed, plain: Replayed) -> Any:
    return apart(numbered(found.outputs), numbered(plain.outputs), masks=True)


def _beside_truth(
    found: Difference,
    sides: tuple[Mapping[Key, torch.Tensor], Mapping[Key, torch.Tensor], Mapping[Key, torch.Tensor]],
    units: Mapping[Key, float],
    *,
    masks: bool = False,
) -> Difference:
    """How far the lever's and plain's are from float64; `units` are what rounding moves."""
    changed, plain, truth = sides
    ours, theirs = (apart(side, truth, masks=masks) for side in (changed, plain))
    distances = {key: a.distance for key, a in ours.items()}
    return dataclasses.replace(
        found,
        truth_error=relative_error(ours.values()),
        baseline_truth_error=relative_error(theirs.values()),
        truth_multiple=furthest(distances, {k: max(theirs[k].distance, unit) for k, unit in units.items()})[1],
    )


Values = dict[torch.Tensor, torch.Tensor]


def shaken(
    calls: Sequence[CapturedCall], seed: int, least_epsilon: float = 0.0, values: Values | None = None
) -> list[CapturedCall]:
    """The same calls with every number moved by about one unit in its last place; `values`: parameters that were."""
    generators: dict[torch.device, torch.Generator] = {}

    def noise(like: torch.Tensor) -> torch.Tensor:
        if is_distributed(like):
            return distributed_like(like, noise(like.to_local()))  # type: ignore[attr-defined]
        generator = generators.get(like.device)
        if generator is None:
            generator = generators[like.device] = torch.Generator(like.device).manual_seed(seed)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.empty(like.shape, dtype=wide, device=like.device).normal_(generator=generator)

    return [_shaken(call, noise, epsilon_of(call, least_epsilon), values) for call in calls]


def _shaken(call: CapturedCall, noise: Any, epsilon: float, values: Values | None = None) -> CapturedCall:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            moved = torch.view_as_complex(move(reals(tensor.detach())).contiguous())
            return moved.requires_grad_(tensor.requires_grad)
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        random = noise(tensor)
        value = tensor.detach().to(random.dtype)
        moved = (value + value * epsilon * random).to(tensor.dtype)
        return torch.where(torch.isfinite(tensor), moved, tensor.detach()).requires_grad_(tensor.requires_grad)

    parameters = [p for p in call.call.module.parameters() if _has_places(p)]
    return call.changed(
        args=map_tensors(move, call.args, objects=False),
        kwargs=map_tensors(move, call.kwargs, objects=False),
        gradients=[move(g) if g is not None else None for g in call.gradients],
        former_values=values or {p: move(call.former_values.get(p, p).detach()) for p in parameters},
    )


def epsilon_of(call: CapturedCall, least: float = 0.0) -> float:
    """Spacing of the coarsest floats that the call computes with, relative to 1.

    What is stored in float32 is multiplied on a device in TF32 where that is allowed: for convolutions it is from the
    start.
    """
    if call.device != "cpu" and _rounds_to_tf32(call.call.module):
        least = max(least, TF32)
    dtypes = {p.dtype for p in call.call.module.parameters() if _has_places(p)}
    dtypes |= call.autocast_dtypes
    return max(least, *(torch.finfo(d).eps for d in dtypes)) if dtypes else max(least, torch.finfo(torch.float32).eps)


def _rounds_to_tf32(module: nn.Module) -> bool:
    """Whether products of float32 in a module may be rounded to TF32 now."""
    if torch.cuda.get_device_capability() < FIRST_WITH_TF32:
        return False
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if _allowed(cuda.matmul, cuda.matmul):
        return True
    kinds = {_ConvNd: getattr(cudnn, "conv", None), nn.RNNBase: getattr(cudnn, "rnn", None)}
    return any(
        isinstance(part, kind) for kind, own in kinds.items() if _allowed(own, cudnn) for part in module.modules()
    )


def _allowed(of_operation: Any, of_library: Any) -> bool:
    """Whether a family of operations may compute in TF32, asked in words that do not raise where both are in use."""
    precision = getattr(of_operation, "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    with warnings.catch_warnings():  # before PyTorch 2.9 there was one word only, which later versions warn of
        warnings.simplefilter("ignore")
        return bool(of_library.allow_tf32)


def _has_places(tensor: torch.Tensor) -> bool:
    """Whether its numbers have a last place."""
    return tensor.is_floating_point() or tensor.is_complex()
