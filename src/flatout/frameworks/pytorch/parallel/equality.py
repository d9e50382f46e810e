"""Do all ranks hold the same? Parameters, buffers, random numbers, the batch itself.

Before the first divided call rank 0's values are taken where others differ; a batch that differs cannot be mended. In
the middle of training parameters are summed up bit by bit, with where the generators stand; what differs by rounding
alone, because ranks compute on different processors, is given to all by rank 0. In: a module and the inputs of a call,
calls made. Out: the same on every rank, or what differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.cuts import Tensors
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import digest


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    return digest([one.resolve_conj().resolve_neg() for one in tensors if not one.is_meta])


def state_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, each once."""
    return list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())


def make_equal(module: nn.Module, group: Group) -> list[str]:
    """Give every rank rank 0's state where it has another one; what that was, in words."""
    state = state_of(module)
    found = group.objects((_digest(state), [tuple(t.shape) for t in state]), "comparison of states")
    told = []
    if any(shapes != found[0][1] for _, shapes in found):
        return ["the model has other parameters"]
    if any(values != found[0][0] for values, _ in found):
        with torch.no_grad():
            for tensor in state:
                group.broadcast(tensor.data, "state of rank 0")
        told.append("parameters")
    states = group.objects(RandomStates(), "comparison of random numbers")
    if not all(one.equals(states[0]) for one in states):
        states[0].restore()
        told.append("random numbers")
    return told


def same_batch(tensors: Tensors, group: Group) -> bool:
    """Whether all ranks call the model with the same inputs."""
    return len(set(group.objects(_digest(tensors), "comparison of batches"))) == 1


FIRST_AT, MOST_BETWEEN = 20, 160
"""Calls before the first comparison and between later ones, which come at twice as many calls until then. One takes up
to half of a step, so that they take some 0.3 % of the time."""

ROUNDING = 1e-3
"""Relative difference of norms up to which parameters differ by rounding."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers as wide as an element."""


class RunningCheck:
    """Compares ranks as they go on."""

    def __init__(self, group: Group, parameters: Callable[[], Tensors]) -> None:
        self._group, self._parameters = group, parameters
        self.num_calls = 0
        self._next_at = FIRST_AT

    def called(self) -> None:
        """A divided call is about to be made; at those that all ranks agree on they are compared; or `NotDivided`."""
        self.num_calls += 1
        if self.num_calls >= self._next_at:
            self.compare()

    def compare(self) -> bool:
        """Compare ranks at the same call; whether rank 0's parameters were given to all; or `NotDivided`."""
        parameters = self._parameters()
        generator = zlib.crc32(torch.get_rng_state().numpy().tobytes())  # where it stands
        mine = torch.tensor([_bits(parameters), generator], dtype=torch.float64)
        rows = self._group.gather(mine, "comparison of ranks")
        is_same = (rows == rows[0]).all(0).tolist()
        if not is_same[0]:
            self._mend(parameters)
        if not is_same[1]:
            raise self._diverged("their random numbers", "something draws on some ranks and not on others")
        self._next_at = self.num_calls + min(max(self.num_calls, FIRST_AT), MOST_BETWEEN)
        return not is_same[0]

    def _mend(self, parameters: Tensors) -> None:
        norm = sum(float(one.detach().double().norm()) for one in parameters if not one.is_complex())
        norms = self._group.gather(torch.tensor([norm], dtype=torch.float64), "norms of parameters")
        spread = float((norms.max() - norms.min()) / norms.abs().max().clamp_min(1e-30))
        if not spread <= ROUNDING:  # also where it is no number
            raise self._diverged("their parameters", f"the norms of parameters differ by {spread:.1g}")
        for parameter in parameters:
            self._group.broadcast(parameter.data, "parameters of rank 0")

    def _diverged(self, what: str, cause: str) -> NotDivided:
        return NotDivided(
            f"ranks have diverged: {what} differ after {self.num_calls:,} calls",
            cause=cause,
            hint="what a script reads or draws must not depend on the process; seed it, or run it on one rank",
        )


def _bits(tensors: Tensors) -> float:
    """The bits of all tensors, summed up in each and put together."""
    sums = []
    for tensor in tensors:
        if tensor.layout is torch.strided:
            words = tensor.detach().contiguous().view(-1).view(_WORDS[min(tensor.element_size(), 8)])
            sums.append(words.sum(dtype=words.dtype))  # what runs over is of no matter, and this is the fastest sum
    return float(hash(tuple(int(one) for one in sums)) % (1 << 53))
