"""How do the gradients of parameters come to be those of the whole batch?

Within a divided call the module computes with aliases of its parameters, leaves that share their memory, and the
reducer of PyTorch's DistributedDataParallel sums the aliases' gradients over ranks, in buckets, beside the backward
pass. The parameters themselves get the sums from the call's node in the script's graph: so hooks of the script's own,
penalties that it adds to its loss, accumulated gradients and `torch.autograd.grad` see what one process sees. In: a
module. Out: its aliases in place for a call, and summed gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Found, Leaves
from flatout.frameworks.pytorch.parallel.stand_ins import StandIns
from flatout.frameworks.pytorch.parallel.summing import Summing


class Aliases:
    """The parameters of one module, whole on every rank, and their stand-ins."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._stand_ins = StandIns(module)
        self._group = group
        self._summings: dict[tuple[bool, ...], Summing] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """See `Held`."""
        return self._stand_ins.parameters

    def renew(self) -> None:
        """See `Held`."""
        if self._stand_ins.renew():
            self._summings.clear()

    @property
    def used(self) -> list[nn.Parameter]:
        """The stand-ins of the parameters that are trained."""
        return self._stand_ins.used

    @property
    def leaves(self) -> list[torch.Tensor]:
        """See `Held`."""
        return list(self.used)

    def at_once(self) -> AbstractContextManager[None]:
        """See `Held`: they are."""
        return nullcontext()

    def in_place(self) -> AbstractContextManager[None]:
        """See `Held`."""
        return self._stand_ins.in_place()

    @contextmanager
    def in_whole(self) -> Iterator[Leaves]:
        """See `Held`."""
        with self.in_place():
            yield self.used

    def nudged(self, times: int) -> AbstractContextManager[None]:
        """See `Held`."""
        return self._stand_ins.nudged(times)

    def close(self) -> None:
        """See `Held`."""
        self._summings.clear()

    def gradients(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *,
        summed: bool, leaves: Leaves = (),
    ) -> tuple[Found, Found]:  # fmt: skip
        """See `Held`; those of inputs are not summed."""
        del leaves  # its own
        used = self.used
        found: Found = [None] * (len(used) + len(inputs))
        if outputs and found:
            entered = [*used, *inputs]
            found = list(torch.autograd.grad(list(outputs), entered, list(gradients), allow_unused=True))
        of_parameters, of_inputs = found[: len(used)], found[len(used) :]
        if summed:
            whole = [
                torch.zeros_like(p) if g is None else g if g.is_sparse else g.clone()
                for p, g in zip(used, of_parameters, strict=True)
            ]
            of_parameters = [g if g.is_sparse else self._group.sum(g, "gradients, to compare") for g in whole]
        return of_parameters, of_inputs

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, keep: bool) -> Found:
        """Go back through a divided call: the gradients of the parameters, summed over ranks.

        The reducer takes the mean over ranks. A hook of ours in its place would run in a thread that may still need
        the interpreter when the process ends, and abort it; so gradients go in `world` times as large, which is exact
        where that is a power of two. Those of the inputs come out as large.

        Args:
            outputs: What it computed here.
            gradients: Theirs.
            keep: Whether the graph is gone through again.
        """
        gradients = [gradient * self._group.world for gradient in gradients]
        if not self.used:  # a critic that is kept from training lets gradients through
            if outputs:
                torch.autograd.backward(list(outputs), gradients, retain_graph=keep)
            return [None for _ in self.parameters]
        summed = iter(self._summing().gone_back(outputs, gradients, keep=keep))
        return [next(summed) if parameter.requires_grad else None for parameter in self.parameters]

    def _summing(self) -> Summing:
        """What sums the gradients of those that are trained now: a script may switch some off and on again."""
        trained = tuple(parameter.requires_grad for parameter in self.parameters)
        if trained not in self._summings:
            self._summings[trained] = Summing(self.used, self._group)
        return self._summings[trained]
