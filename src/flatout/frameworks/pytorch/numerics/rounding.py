"""How far may rounding alone move the gradient of this very step, parameter by parameter, and its outputs?

The step is replayed with every number that goes into it (parameters, inputs, the gradients that came back for the
outputs) moved by one unit in its last place: what that moves, another order of the same operations may move as well.
In: captured calls and their plain replay. Out: for each parameter and output the size of that movement. Loaded in
trials only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.differences import Key, outputs_apart, reals, square
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer
from flatout.frameworks.pytorch.numerics.trained import distributed_like, is_distributed
from flatout.frameworks.pytorch.seams.trees import map_tensors

NUM_SHAKES = 3
"""Replays with moved numbers; of a gradient of few elements one may come back to where it was by chance."""

SLOW_S = 0.5
"""From so long a replay on, one has to do."""

DECIDES_NOTHING = 0.25
"""Units in the last place of the whole gradient below which a parameter's error is not looked at. A bias that batch
statistics take away again has a gradient of nothing but rounding: up to 0.06 of such units were seen in bfloat16."""

Owner = torch.Tensor | Key
"""A parameter, whose gradient is meant, or the key of a buffer."""

LEAST_SHARE = 0.25
"""A parameter is never taken to be less sensitive than this share of the whole gradient's sensitivity."""


def rounding_scales(
    replayer: Replayer, calls: Sequence[CapturedCall], plain: Replayed, least_epsilon: float = 0.0
) -> Scales:
    """Replay the calls with all numbers moved by their last place, and note how far gradients, buffers and outputs go.

    Args:
        replayer: Runs calls again.
        calls: The captured step.
        plain: Its replay.
        least_epsilon: Spacing of the floats that a lever computes with, relative to 1, where that is coarser.
    """
    moved: dict[Owner, float] = {}
    outputs = [0.0] * len(plain.outputs)
    for seed in range(1 if plain.took_s > SLOW_S else NUM_SHAKES):
        found = replayer.run(shaken(calls, seed, least_epsilon))
        for owner, distance in distances(found, plain).items():
            moved[owner] = max(moved.get(owner, 0.0), distance)
        apart = outputs_apart(found.outputs, plain.outputs)
        outputs = [max(former, a.distance) for former, a in zip(outputs, apart, strict=True)]
    return Scales(plain, moved, outputs, max((epsilon_of(c, least_epsilon) for c in calls), default=0.0))


def distances(found: Replayed, plain: Replayed) -> dict[Owner, float]:
    """How far each gradient of a parameter, and each buffer, lies from plain's; of what both have."""
    apart: dict[Owner, float] = {}
    for parameter, value in plain.gradients.items():
        if parameter in found.gradients:
            apart[parameter] = _norm(found.gradients[parameter].double() - value.double())
    for key, (_, after) in plain.buffers.items():
        other = found.buffers[key][1] if key in found.buffers else after
        same = other.shape == after.shape
        apart[key] = _norm(other.double() - after.double()) if same else math.inf
    return apart


class Scales:
    """What one unit in the last place moves: the whole gradient, each parameter's, each buffer and each output."""

    def __init__(self, plain: Replayed, moved: dict[Owner, float], outputs: list[float], epsilon: float) -> None:
        norms = {p: _norm(value) for p, value in plain.gradients.items()}
        whole = math.sqrt(math.fsum(n * n for n in norms.values()))
        all_moved = math.sqrt(math.fsum(moved.get(p, 0.0) ** 2 for p in norms))
        self.relative = all_moved / whole if whole > 0 else 0.0
        """Movement of the whole gradient over its norm."""
        least = max(torch.finfo(torch.float32).eps, DECIDES_NOTHING * epsilon) * whole if epsilon else 0.0
        self._of: dict[Owner, float] = {
            p: max(moved.get(p, 0.0), LEAST_SHARE * self.relative * norm, least) for p, norm in norms.items()
        }
        for key, (_, after) in plain.buffers.items():
            last_place = torch.finfo(after.dtype).eps if after.is_floating_point() else 0.0
            self._of[key] = max(moved.get(key, 0.0), last_place * _norm(after))
        sizes = [a.size for a in outputs_apart(plain.outputs, plain.outputs)]
        whole = math.hypot(*sizes)
        self.outputs_relative = math.hypot(*outputs) / whole if whole > 0 else 0.0
        """Movement of all outputs over their norm."""
        self.outputs = [
            max(moved, LEAST_SHARE * self.outputs_relative * size, max(epsilon, torch.finfo(value.dtype).eps) * size)
            for moved, size, value in zip(outputs, sizes, plain.outputs, strict=True)
        ]
        """What one unit in the last place moves in each output: no less than a unit in its own last place."""

    def of(self, owner: Owner) -> float:
        """What one unit in the last place moves in this gradient or buffer."""
        return self._of.get(owner, 0.0)

    def worst(self, found: Replayed, plain: Replayed) -> tuple[Owner | None, float]:
        """The parameter or buffer whose error is the largest multiple of what rounding moves, and that multiple."""
        furthest: tuple[Owner | None, float] = (None, 0.0)
        for owner, error in distances(found, plain).items():
            scale = self.of(owner)
            multiple = error / scale if scale > 0 else (math.inf if error > 0 else 0.0)
            if not multiple <= furthest[1]:  # NaN as well
                furthest = owner, multiple
        return furthest


def _norm(value: torch.Tensor) -> float:
    return math.sqrt(square(value if value.is_floating_point() else value.double()))


def shaken(calls: Sequence[CapturedCall], seed: int, least_epsilon: float = 0.0) -> list[CapturedCall]:
    """The same calls with every number moved by about one unit in its last place."""
    generators: dict[torch.device, torch.Generator] = {}

    def noise(like: torch.Tensor) -> torch.Tensor:
        if is_distributed(like):
            return distributed_like(like, noise(like.to_local()))  # type: ignore[attr-defined]
        generator = generators.get(like.device)
        if generator is None:
            generator = generators[like.device] = torch.Generator(like.device).manual_seed(seed)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.empty(like.shape, dtype=wide, device=like.device).normal_(generator=generator)

    return [_shaken(call, noise, epsilon_of(call, least_epsilon)) for call in calls]


def _shaken(call: CapturedCall, noise: Any, epsilon: float) -> CapturedCall:
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
        former_values={p: move(call.former_values.get(p, p).detach()) for p in parameters},
    )


def epsilon_of(call: CapturedCall, least: float = 0.0) -> float:
    """Spacing of the coarsest floats that the call computes with, relative to 1."""
    dtypes = {p.dtype for p in call.call.module.parameters() if _has_places(p)}
    dtypes |= call.autocast_dtypes
    return max(least, *(torch.finfo(d).eps for d in dtypes)) if dtypes else max(least, torch.finfo(torch.float32).eps)


def _has_places(tensor: torch.Tensor) -> bool:
    """Whether its numbers have a last place."""
    return tensor.is_floating_point() or tensor.is_complex()
