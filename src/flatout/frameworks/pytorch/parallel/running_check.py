"""Do ranks that began with the same still hold the same? A cheap comparison, ever so often, in the middle of training.

Parameters are summed up bit by bit, with where the generators stand and how many calls were made; ranks exchange a few
numbers. How often follows from what a comparison costs. What differs by rounding alone, because ranks compute on
different processors, is given to all by rank 0. In: divisions and calls made. Out: nothing, or an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided

MOST_SHARE = 0.004
"""Share of the run's time that comparing may take."""

FIRST_AT = 20
"""Divided calls before the first comparison."""

FEWEST_BETWEEN = 20

ROUNDING = 1e-3
"""Relative difference of norms up to which parameters differ by rounding."""


class RunningCheck:
    """Compares ranks as they go on."""

    def __init__(self, group: Group, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._group, self._parameters = group, parameters
        self._num_calls = 0
        self._next_at = FIRST_AT
        self._last_s = perf_counter()
        self._last_at = 0
        self.num_mended = 0
        """Comparisons after which rank 0's parameters were given to all."""

    def called(self) -> None:
        """A divided call is about to be made; at those that all ranks agree on they are compared.

        Raises:
            NotDivided: They have diverged.
        """
        self._num_calls += 1
        if self._num_calls >= self._next_at:
            self.compare()

    def compare(self) -> None:
        """Compare ranks now; all of them are at the same call.

        Raises:
            NotDivided: They have diverged.
        """
        begun_s = perf_counter()
        group, parameters = self._group, self._parameters()
        mine = torch.tensor([*_sums(parameters), _generator()], dtype=torch.float64)
        rows = group.gather(mine, "comparison of ranks")
        bits, norms, generators = rows[:, :2], rows[:, 2], rows[:, 3]
        if not bool((bits == bits[0]).all()):
            self._mend(parameters, norms)
        if not bool((generators == generators[0]).all()):
            raise self._diverged("their random numbers", "something draws on some ranks and not on others")
        cost_s = perf_counter() - begun_s
        call_s = (begun_s - self._last_s) / max(self._num_calls - self._last_at, 1)
        wanted = cost_s / MOST_SHARE / max(call_s, 1e-9)
        # What ranks measure differs, and they must compare at the same call.
        agreed = int(group.gather(torch.tensor([wanted], dtype=torch.float64), "comparison of ranks").max())
        self._last_at, self._next_at = self._num_calls, self._num_calls + max(agreed, FEWEST_BETWEEN)
        self._last_s = perf_counter()
        group.page.check(self._last_s - begun_s)

    def _mend(self, parameters: Sequence[torch.Tensor], norms: torch.Tensor) -> None:
        spread = float((norms.max() - norms.min()) / norms.abs().max().clamp_min(1e-30))
        if not spread <= ROUNDING:  # also where it is no number
            raise self._diverged("their parameters", f"the norms of parameters differ by {spread:.1g}")
        self.num_mended += 1
        for parameter in parameters:
            self._group.broadcast(parameter.data, "parameters of rank 0")

    def _diverged(self, what: str, cause: str) -> NotDivided:
        return NotDivided(
            f"ranks have diverged: {what} differ after {self._num_calls:,} calls",
            cause=cause,
            hint="what a script reads or draws must not depend on the process; seed it, or run it on one rank",
        )


def _sums(parameters: Sequence[torch.Tensor]) -> tuple[float, float, float]:
    """The bits of all parameters, summed up in two ways, and the sum of their norms."""
    bits, norm = 0, 0.0
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for parameter in parameters:
        values = parameter.detach()
        sums.append(values.view(-1).view(wide[values.element_size()]).sum() if values.is_contiguous() else None)
        norm_of = values.norm() if values.is_floating_point() else values.abs().sum()
        sums.append(norm_of)
    for place in range(0, len(sums), 2):
        own, norm_of = sums[place], sums[place + 1]
        value = 0 if own is None else int(own)
        bits = (bits * 31 + value) % (1 << 53)
        assert norm_of is not None
        norm += float(norm_of)
    return float(bits), float(bits % 1_000_003), norm


def _generator() -> float:
    """Where PyTorch's generator stands, as a number."""
    return float(zlib.crc32(torch.get_rng_state().numpy().tobytes()))
