"""How far apart are two sets of tensors? Distance, sizes and inner product of each, in double precision, one at a time.

Relative error, slope, cosine and the worst of them follow from these, whether gradients, updates or outputs are
compared. In: tensors by key (a parameter, the number of an output), changed and plain. Out: a `Difference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flatout.records.difference import Difference

Gradients = dict[torch.Tensor, torch.Tensor]
BufferKey = tuple[int, str]
Key = TypeVar("Key")

BUFFER_SHARE = 1e-3

NO_NUMBER = 1e30
"""From here on an output stands for something else (a place that is masked), as infinity and NaN do."""

AT_ONCE = 2**22
"""Numbers of a tensor that are held in double precision at a time."""


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as plain real numbers: a sparse gradient written out, a complex one as its two parts."""
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def square(tensor: torch.Tensor) -> float:
    """The squared norm of a tensor."""
    return float(torch.linalg.vector_norm(reals(tensor.detach()), dtype=torch.float64)) ** 2


@dataclass(frozen=True, slots=True)
class Apart:
    """One tensor beside plain's: the norm of their difference, plain's norm, and its own."""

    distance: float
    size: float
    own_size: float

    @property
    def product(self) -> float:
        """Their inner product; 0 where they cannot be compared."""
        return (self.size**2 + self.own_size**2 - self.distance**2) / 2 if math.isfinite(self.distance) else 0.0

    @property
    def error(self) -> float:
        """The distance relative to plain's size."""
        return relative_error([self])


def apart(
    found: Mapping[Key, torch.Tensor], plain: Mapping[Key, torch.Tensor], *, masks: bool = False
) -> dict[Key, Apart]:
    """Each tensor of both; infinitely far where it is on one side alone, or has another shape.

    With `masks` what stands for no number in plain has to stand for the same, and is left out of the sums.
    """
    nothing = [key for key in found if key not in plain]
    compared = {key: _apart(found.get(key), value, masks) for key, value in plain.items()}
    return compared | {key: Apart(math.inf, 0.0, math.sqrt(square(found[key].double()))) for key in nothing}


def _apart(found: torch.Tensor | None, plain: torch.Tensor, masks: bool) -> Apart:
    if found is None or found.shape != plain.shape:
        return Apart(math.inf, math.sqrt(square(plain.double())), math.inf)
    parts = zip(found.reshape(-1).split(AT_ONCE), plain.reshape(-1).split(AT_ONCE), strict=True)
    # what is kept of plain lies on the host where it had no room on the device
    sums = [_sums(ours.double(), theirs.to(ours.device).double(), masks) for ours, theirs in parts]
    return Apart(*(math.sqrt(math.fsum(s[n] for s in sums)) for n in range(3)))


def _sums(found: torch.Tensor, plain: torch.Tensor, masks: bool) -> tuple[float, float, float]:
    """Squares of the difference and of both."""
    numbers = plain.abs() < NO_NUMBER
    if masks and not bool(numbers.all()):
        same = torch.where(plain.isnan(), found.isnan(), (found.abs() >= NO_NUMBER) & (found.sign() == plain.sign()))
        found = torch.where(numbers, found, torch.where(same, 0.0, math.inf))
        plain = torch.where(numbers, plain, 0.0)
    return square(found - plain), square(plain), square(found)


def relative_error(compared: Collection[Apart]) -> float:
    """Norm of all differences over plain's; infinite where plain has nothing and the other has something."""
    error, norm = math.hypot(*(a.distance for a in compared)), math.hypot(*(a.size for a in compared))
    return error / norm if norm > 0 else (0.0 if error == 0 else math.inf)


def error_of(found: Mapping[Key, torch.Tensor], plain: Mapping[Key, torch.Tensor]) -> float:
    """Relative error of all tensors together."""
    return relative_error(apart(found, plain).values())


def cosine(compared: Collection[Apart]) -> float:
    """The cosine of the angle between both, 1 where they point the same way or one is nothing."""
    norms = math.sqrt(math.fsum(a.size**2 for a in compared) * math.fsum(a.own_size**2 for a in compared))
    return math.fsum(a.product for a in compared) / norms if norms > 0 else 1.0


def summary(check: str, compared: Mapping[Key, Apart], name: Callable[[Key | None], str]) -> Difference:
    """All tensors together and the worst one; the slope is 1 where nothing is scaled."""
    each = compared.values()
    size2 = math.fsum(a.size**2 for a in each)
    worst = max(compared, key=lambda k: math.inf if math.isnan(compared[k].error) else compared[k].error, default=None)
    return Difference(
        check=check,
        error=relative_error(each),
        slope=math.fsum(a.product for a in each) / size2 if size2 > 0 else 1.0,
        worst=name(worst),
        worst_error=0.0 if worst is None else compared[worst].error,
        finite=all(math.isfinite(a.own_size) for a in each),
    )


def furthest(distances: Mapping[Key, float], units: Mapping[Key, float]) -> tuple[Any, float]:
    """Which distance is the largest multiple of its unit (None where all are 0), and that multiple."""
    found: tuple[Key | None, float] = (None, 0.0)
    for key, distance in distances.items():
        scale = units.get(key, 0.0)
        multiple = distance / scale if scale > 0 else (math.inf if distance > 0 else 0.0)
        if not multiple <= found[1]:  # NaN as well
            found = key, multiple
    return found


def numbered(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Outputs by their number."""
    return dict(enumerate(tensors))


def buffer_error(
    found: Mapping[BufferKey, tuple[torch.Tensor, torch.Tensor]],
    baseline: Mapping[BufferKey, tuple[torch.Tensor, torch.Tensor]],
) -> tuple[BufferKey | None, float]:
    """The buffer that differs most after a call, and its error relative to how far the baseline moved it.

    A buffer that hardly moves is measured against a thousandth of its own size, below which rounding alone shows; one
    that has another shape after each call, against its own size. One that is there on one side alone is infinitely off.
    """
    after: list[dict[Any, torch.Tensor]] = [
        {key: value for key, (_, value) in side.items()} for side in (found, baseline)
    ]

    units = {}
    for key, (before, value) in baseline.items():
        size = math.sqrt(square(value.double()))
        moved = math.sqrt(square(value.double() - before.double())) if before.shape == value.shape else size
        units[key] = max(moved, BUFFER_SHARE * size)
    return furthest({key: a.distance for key, a in apart(*after).items()}, units)
