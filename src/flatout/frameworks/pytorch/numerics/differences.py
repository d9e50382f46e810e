"""How far apart are two sets of tensors? Relative error, slope, cosine, worst: in double precision, one at a time.

In: gradients (or updates) by parameter, plain and changed. Out: numbers for a `Difference`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Gradients = dict[torch.Tensor, torch.Tensor]
Key = tuple[int, str]

BUFFER_SHARE = 1e-3

NO_NUMBER = 1e30
"""From here on an output stands for something else (a place that is masked), as infinity and NaN do."""

AT_ONCE = 2**22
"""Numbers of an output that are held in double precision at a time."""


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


@dataclass(frozen=True, slots=True)
class Apart:
    """One output beside the same output of plain: how far it is from there, how large each is, their inner product."""

    distance: float
    size: float
    own_size: float
    product: float


def outputs_apart(found: Sequence[torch.Tensor], baseline: Sequence[torch.Tensor]) -> list[Apart]:
    """Each of the baseline's outputs; infinitely far where there is none of its shape in that place."""
    others = [*found, *[None] * (len(baseline) - len(found))]
    return [_apart(other, value) for other, value in zip(others, baseline, strict=False)]


def _apart(found: torch.Tensor | None, plain: torch.Tensor) -> Apart:
    if found is None or found.shape != plain.shape:
        return Apart(math.inf, math.sqrt(square(plain)), math.inf, 0.0)
    parts = zip(found.reshape(-1).split(AT_ONCE), plain.reshape(-1).split(AT_ONCE), strict=True)
    sums = [_sums(ours.double(), theirs.double()) for ours, theirs in parts]
    distance, size, own_size = (math.sqrt(math.fsum(s[n] for s in sums)) for n in range(3))
    return Apart(distance, size, own_size, sum(s[3] for s in sums))


def _sums(found: torch.Tensor, plain: torch.Tensor) -> tuple[float, float, float, float]:
    """Squares of the difference, of both, and their product, over the places in which plain has a number."""
    numbers = plain.abs() < NO_NUMBER
    if not bool(numbers.all()):  # what stands for no number has to stand for the same
        same = torch.where(plain.isnan(), found.isnan(), (found.abs() >= NO_NUMBER) & (found.sign() == plain.sign()))
        found = torch.where(numbers, found, torch.where(same, 0.0, math.inf))
        plain = torch.where(numbers, plain, 0.0)
    return square(found - plain), square(plain), square(found), float(torch.dot(found, plain))


def output_error(found: Sequence[torch.Tensor], baseline: Sequence[torch.Tensor]) -> float | None:
    """Relative error of a call's outputs; None where they cannot be paired."""
    if not baseline or len(found) != len(baseline):
        return None
    return whole_error(outputs_apart(found, baseline))


def whole_error(apart: Sequence[Apart]) -> float:
    """Relative error of all outputs together."""
    error, norm = math.hypot(*(a.distance for a in apart)), math.hypot(*(a.size for a in apart))
    return error / norm if norm > 0 else (0.0 if error == 0 else math.inf)


def buffer_error(
    found: Mapping[Key, tuple[torch.Tensor, torch.Tensor]], baseline: Mapping[Key, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Key | None, float]:
    """The buffer that differs most after a call, and its error relative to how far the baseline moved it.

    A buffer that hardly moves is measured against a thousandth of its own size, below which rounding alone shows; one
    that has another shape after each call, against its own size. One that is there on one side alone is infinitely off.
    """
    if new := next((key for key in found if key not in baseline), None):
        return new, math.inf
    furthest: tuple[Key | None, float] = (None, 0.0)
    for key, (before, after) in baseline.items():
        other = found[key][1] if key in found else None
        if other is None or other.shape != after.shape:
            return key, math.inf
        if torch.equal(other, after):
            continue
        size = math.sqrt(square(after.double()))
        moved = math.sqrt(square(after.double() - before.double())) if before.shape == after.shape else size
        scale = max(moved, BUFFER_SHARE * size)
        error = math.sqrt(square(other.double() - after.double()))
        relative = error / scale if scale > 0 else math.inf
        if not relative <= furthest[1]:  # NaN as well
            furthest = key, relative
    return furthest
