"""How does a rank hold parts of parameters with which it computes its share of the model?

The script's own parameters become `Sharded` in the memory of this rank's parts; what is not cut is whole on every rank.
Within a call modules compute with stand-ins for what is here. In: a module and how each parameter is cut. Out: its
parameters held in parts, whole ones where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.cuts import Tensors
from flatout.frameworks.pytorch.parallel.gradients import summed_in_buckets
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.protocol import Found, Leaves, ParameterHolder
from flatout.frameworks.pytorch.parallel.sharded_tensor import Placement, Sharded, become, whole_of
from flatout.frameworks.pytorch.parallel.stand_ins import StandIns, Swaps, refuse_others, stand_in, take_place


class Parts(ParameterHolder):
    """The parameters of one module, parts of some of them; they are cut now, as `placements` says by their identity.

    `are_alike`: whether all ranks compute with the same parameters, or parts of them, in each call. Where not, each
    computes with some of the model's layers, and gradients of those that are whole are sums over ranks.
    """

    def __init__(
        self, module: nn.Module, group: Group, placements: Mapping[int, Placement], *, are_alike: bool
    ) -> None:
        self._group, self._are_alike = group, are_alike
        torch.clear_autocast_cache()  # it holds what was computed from parameters to find how they are divided
        for parameter in module.parameters():
            cut = placements.get(id(parameter))
            if cut is not None:
                with torch.no_grad():
                    part = cut.mine(parameter.detach()).clone(memory_format=torch.contiguous_format)
                take_place(parameter, part, cut)
        self._stand_ins = StandIns(module, frozen=True)
        self._stand_ins.renew()
        self._within = False
        self._wholes: list[torch.Tensor] = []
        self.parameters = self._stand_ins.parameters

    @property
    def module(self) -> nn.Module:
        """Whose parameters they are."""
        return self._stand_ins.module

    @property
    def leaves(self) -> list[torch.Tensor]:
        """See `ParameterHolder`."""
        return self._wholes or list(self._stand_ins.used)

    def renew(self) -> None:
        """See `ParameterHolder`."""
        refuse_others(self.module, self.parameters)
        self._stand_ins.renew()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """See `ParameterHolder`."""
        if self._within:
            yield
            return
        self._within = True
        try:
            with self._stand_ins.in_place(), self.computing():
                yield
        finally:
            self._within = False

    def computing(self) -> AbstractContextManager[None]:
        """Within, modules compute with parts; to be said by who knows how."""
        return nullcontext()

    @contextmanager
    def in_whole(self) -> Iterator[Leaves]:
        """See `ParameterHolder`."""
        if self._within:
            yield ()
            return
        self._stand_ins.renew()
        pairs = zip(self.parameters, self._stand_ins.every, strict=True)
        every = {id(p): stand_in(whole_of(p)) if isinstance(p, Sharded) else other for p, other in pairs}
        wholes = {id(p): every[id(p)] if p.requires_grad else every[id(p)].detach() for p in self.parameters}
        self._within = True
        try:
            with Swaps(self.module, wholes).made():
                self._wholes = [wholes[id(p)] for p in self.used]
                yield self._wholes
        finally:
            self._within, self._wholes = False, []

    def at_once(self) -> AbstractContextManager[Any]:
        """See `ParameterHolder`."""
        return self.in_whole()

    def backward(self, outputs: Tensors, gradients: Tensors, *, keep: bool) -> Found:
        """See `ParameterHolder`."""
        self.forget_gradients()
        if outputs:
            torch.autograd.backward(list(outputs), list(gradients), retain_graph=keep)
        return self.collected()

    def forget_gradients(self) -> None:
        """Stand-ins have none."""
        for leaf in self._stand_ins.every:
            leaf.grad = None

    def collected(self) -> Found:
        """The gradients that stand-ins have now: a parameter that some rank has used has one on all."""
        leaves = self._stand_ins.every
        mine = [leaf.grad for leaf in leaves]
        self.forget_gradients()
        used = [grad is not None for grad in mine]
        if not self._are_alike:
            used = self._group.anywhere(used, "which parameters were used")
        found: Found = [None] * len(mine)
        whole: dict[int, torch.Tensor] = {}
        for place, (parameter, leaf, was) in enumerate(zip(self.parameters, leaves, used, strict=True)):
            if not (was and parameter.requires_grad):
                continue
            grad = mine[place]
            part = torch.zeros_like(leaf) if grad is None else grad
            found[place] = become(part, parameter.placement) if isinstance(parameter, Sharded) else part
            if not isinstance(parameter, Sharded) and not self._are_alike:
                whole[place] = part
        sums = summed_in_buckets([*whole.values()], self._group, "gradients of what ranks share")
        for place, grad in zip(whole, sums, strict=True):
            found[place] = grad
        return found

    def gradients(self, outputs: Tensors, gradients: Tensors, leaves: Leaves) -> Found:
        """See `ParameterHolder`: those of whole parameters, of which this rank's parts are told."""
        return [
            grad if grad is None or not isinstance(p, Sharded) else p.placement.mine(grad)
            for p, grad in zip(self.used, super().gradients(outputs, gradients, leaves), strict=False)
        ]
