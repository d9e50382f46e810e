"""How far apart are two sets of tensors? Relative error, slope, cosine, worst: in double precision, one at a time.

In: gradients (or updates) by parameter, plain and changed. Out: numbers for a `Difference`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Gradients = dict[torch.Tensor, torch.Tensor]
Key = tuple[int, str]

BUFFER_SHARE = 1e-3


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as plain real numbers: a sparse gradient written out, a complex one as its two parts."""
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def square(tensor: torch.Tensor) -> float:
    """The squared norm of a tensor."""
    return float(torch.linalg.vector_norm(reals(tensor.detach()), dtype=torch.float64)) ** 2


def relative_error(found: Gradients, baseline: Gradients) -> float:
    """Norm of the difference over the norm of the baseline; infinite where a gradient is lost or new."""
    if found.keys() != baseline.keys():
        return math.inf  # a parameter lost its gradient, or got one
    error = math.fsum(square(found[p].double() - baseline[p].double()) for p in baseline)
    norm = math.fsum(square(baseline[p]) for p in baseline)
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return math.sqrt(error / norm)


def lost_or_new(found: Gradients, baseline: Gradients) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters that have a value in the baseline alone, and those that have one in `found` alone."""
    return [p for p in baseline if p not in found], [p for p in found if p not in baseline]


def dot(a: Gradients, b: Gradients) -> float:
    """The inner product over all parameters that both have."""
    return math.fsum(float((a[p].double() * b[p].double()).sum()) for p in b if p in a)


def slope(found: Gradients, baseline: Gradients) -> float:
    """How the baseline is scaled in `found`: its projection on the baseline, 1 where nothing is scaled."""
    norm = dot(baseline, baseline)
    return dot(found, baseline) / norm if norm > 0 else 1.0


def cosine(found: Gradients, baseline: Gradients) -> float:
    """The cosine of the angle between both, 1 where they point the same way."""
    norm = math.sqrt(dot(found, found) * dot(baseline, baseline))
    return dot(found, baseline) / norm if norm > 0 else 1.0


def worst(found: Gradients, baseline: Gradients) -> tuple[torch.Tensor | None, float]:
    """The parameter with the largest relative error, and that error."""
    errors: list[tuple[float, torch.Tensor]] = []
    for parameter, value in baseline.items():
        norm = square(value)
        other = found.get(parameter)
        if norm > 0 and other is not None:
            errors.append((math.sqrt(square(other.double() - value.double()) / norm), parameter))
    if not errors:
        return None, 0.0
    error, parameter = max(errors, key=lambda item: item[0])
    return parameter, error


def output_error(found: list[torch.Tensor], baseline: list[torch.Tensor]) -> float | None:
    """Relative error of a call's outputs; None where they cannot be paired."""
    if not baseline or len(found) != len(baseline):
        return None
    error = math.fsum(square(a.double() - b.double()) for a, b in zip(found, baseline, strict=True))
    norm = math.fsum(square(b) for b in baseline)
    return math.sqrt(error / norm) if norm > 0 else None


def buffer_error(
    found: Mapping[Key, tuple[torch.Tensor, torch.Tensor]], baseline: Mapping[Key, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Key | None, float]:
    """The buffer that differs most after a call, and its error relative to how far the baseline moved it.

    A buffer that hardly moves is measured against a thousandth of its own size, below which rounding alone shows.
    """
    furthest: tuple[Key | None, float] = (None, 0.0)
    for key, (before, after) in baseline.items():
        other = found[key][1] if key in found else None
        if other is None or other.shape != after.shape:
            return key, math.inf
        if before.shape != after.shape or torch.equal(other, after):
            continue
        moved = math.sqrt(square(after.double() - before.double()))
        scale = max(moved, BUFFER_SHARE * math.sqrt(square(after.double())))
        error = math.sqrt(square(other.double() - after.double()))
        relative = error / scale if scale > 0 else math.inf
        if not relative <= furthest[1]:  # NaN as well
            furthest = key, relative
    return furthest
