"""Do ranks that began with the same still hold the same? A cheap comparison, ever so often, in the middle of training.

Parameters are summed up bit by bit, with where the generators stand; ranks exchange a few numbers, once. How often
follows from what comparing has cost so far. What differs by rounding alone, because ranks compute on different
processors, is given to all by rank 0. In: divisions and calls made. Out: nothing, or an error.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided

MOST_SHARE = 0.004
"""Share of the run's time that comparing may take."""

FIRST_AT = 20
"""Divided calls before the first comparison: by then it costs less than `MOST_SHARE` of them."""

FEWEST_BETWEEN = 20

EXCHANGE_S = 5e-4
"""What an exchange of some numbers costs, before one is measured: gloo's within a machine takes a quarter of that."""

ROUNDING = 1e-3
"""Relative difference of norms up to which parameters differ by rounding."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers as wide as an element."""


class RunningCheck:
    """Compares ranks as they go on."""

    def __init__(self, group: Group, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._group, self._parameters = group, parameters
        self.num_calls = 0
        self._next_at = FIRST_AT
        self._first_s = 0.0
        self._spent_s, self._exchange_s = 0.0, EXCHANGE_S
        """What all comparisons have cost, and the last one's exchange."""
        self.num_mended = 0
        """Comparisons after which rank 0's parameters were given to all."""

    def called(self) -> None:
        """A divided call is about to be made; at those that all ranks agree on they are compared.

        Raises:
            NotDivided: They have diverged.
        """
        self.num_calls += 1
        if self.num_calls == 2:  # the first is no measure: it is computed both ways
            self._first_s = perf_counter()
        if self.num_calls >= self._next_at:
            self.compare()

    def compare(self) -> None:
        """Compare ranks now; all of them are at the same call.

        Raises:
            NotDivided: They have diverged.
        """
        begun_s = perf_counter()
        parameters = self._parameters()
        same = [_bits(parameters), _generator()]
        arrived_s = perf_counter()
        call_s = (begun_s - self._first_s) / max(self.num_calls - 2, 1)
        summed_s = arrived_s - begun_s
        costs = self._spent_s, summed_s + self._exchange_s, call_s
        mine = torch.tensor([*same, arrived_s, *costs], dtype=torch.float64)
        rows = self._group.gather(mine, "comparison of ranks")
        is_same = (rows[:, :2] == rows[0, :2]).all(0).tolist()
        if not is_same[0]:
            self._mend(parameters)
        if not is_same[1]:
            raise self._diverged("their random numbers", "something draws on some ranks and not on others")
        self._next_at = self.num_calls + _calls_until_next(rows[:, 3:].tolist(), self.num_calls)
        self._exchange_s = perf_counter() - self._last_arrival(rows[:, 2].tolist(), arrived_s)
        self._spent_s += summed_s + self._exchange_s
        self._group.page.check(summed_s + self._exchange_s)

    def _last_arrival(self, arrivals: Sequence[float], own_s: float) -> float:
        """When the last rank came to the exchange. Until then others wait, as they would in the next exchange."""
        me = self._group.me
        return max(arrivals) if me.local_world == me.world else own_s  # each machine has a clock of its own

    def _mend(self, parameters: Sequence[torch.Tensor]) -> None:
        norms = self._group.gather(torch.tensor([_norm(parameters)], dtype=torch.float64), "norms of parameters")
        spread = float((norms.max() - norms.min()) / norms.abs().max().clamp_min(1e-30))
        if not spread <= ROUNDING:  # also where it is no number
            raise self._diverged("their parameters", f"the norms of parameters differ by {spread:.1g}")
        self.num_mended += 1
        for parameter in parameters:
            self._group.broadcast(parameter.data, "parameters of rank 0")

    def _diverged(self, what: str, cause: str) -> NotDivided:
        return NotDivided(
            f"ranks have diverged: {what} differ after {self.num_calls:,} calls",
            cause=cause,
            hint="what a script reads or draws must not depend on the process; seed it, or run it on one rank",
        )


def _calls_until_next(costs: Sequence[Sequence[float]], num_calls: int) -> int:
    """Calls until another comparison fits into `MOST_SHARE`, the same on all ranks.

    Args:
        costs: For each rank the seconds that comparing has cost before, those of one comparison, and those of a call.
        num_calls: Calls made so far.

    >>> _calls_until_next([[0.002, 0.002, 0.005], [0.001, 0.002, 0.005]], 100)
    200
    """
    spent_s, cost_s, call_s = max(c[0] for c in costs), max(c[1] for c in costs), min(c[2] for c in costs)
    allowed_at = (spent_s + 2 * cost_s) / MOST_SHARE / max(call_s, 1e-6)  # with this one, and with the next
    return max(math.ceil(allowed_at - num_calls), FEWEST_BETWEEN)


def _bits(tensors: Sequence[torch.Tensor]) -> float:
    """The bits of all tensors, summed up in each and put together."""
    sums = []
    for tensor in tensors:
        if tensor.layout is torch.strided:
            words = tensor.detach().contiguous().view(-1).view(_WORDS[min(tensor.element_size(), 8)])
            sums.append(words.sum(dtype=words.dtype))  # what runs over is of no matter, and this is the fastest sum
    return float(hash(tuple(int(one) for one in sums)) % (1 << 53))


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    """The sum of the norms of all tensors."""
    return sum(float(one.detach().double().norm()) for one in tensors if not one.is_complex())


def _generator() -> float:
    """Where PyTorch's generator stands, as a number."""
    return float(zlib.crc32(torch.get_rng_state().numpy().tobytes()))
