"""How does a model come to be divided by features, and how do ranks compute one batch together then?

Its first call is watched, a plan is made and tried, parameters move. In: a division and its first call. Out: the
parameters in parts, and calls of them; or a refusal, before anything has moved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.division import ModelDivision
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.partial_parameters import Parts
from flatout.frameworks.pytorch.parallel.protocol import ForwardResult, Pass, Pattern
from flatout.frameworks.pytorch.parallel.random_numbers import drawn_apart
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import REPLICATE, Placement
from flatout.frameworks.pytorch.parallel.tensor_layers import Computing, Layer
from flatout.frameworks.pytorch.parallel.tensor_plan import TensorPlan, Watched, agrees
from flatout.frameworks.pytorch.seams.trees import tensors_of


class TensorParts(Parts):
    """The parameters of one module, of each divided layer some features; they are cut now."""

    def __init__(
        self, module: nn.Module, group: Group, layers: Sequence[Layer], placements: dict[int, Placement]
    ) -> None:
        super().__init__(module, group, placements, are_alike=True)
        self.engine = Computing(group, layers)
        self._draws_masks = False
        self._apart = functools.partial(drawn_apart, group.rank)

    def computing(self) -> AbstractContextManager[None]:
        """See `Parts`."""
        return self.engine.in_parts()

    def passed(
        self, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: Pattern, *, silent: bool
    ) -> ForwardResult:
        """See `ParameterHolder`."""
        self._draws_masks = self._draws_masks or pattern.masks
        draws = self._apart if pattern.masks and not silent else nullcontext
        with torch.enable_grad(), self.drawing(draws), self.in_place():
            return Pass(self, compute(*args, **kwargs), args, kwargs, lambda: self.drawing(draws))

    def evaluated(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `ParameterHolder`."""
        self.renew()
        with self.drawing(self._apart if self._draws_masks else nullcontext), self.in_place():
            return compute(*args, **kwargs)

    @contextmanager
    def drawing(self, draws: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Masks for some features are drawn so within."""
        former, self.engine.draws = self.engine.draws, draws
        try:
            yield
        finally:
            self.engine.draws = former
            self.engine.end()


def planned(division: ModelDivision, args: Any, kwargs: Any, refuse: Callable[[NotDivided], Any]) -> TensorParts:
    """Find how a model is divided by its first call, and take its parameters."""
    module, group = division.module(), division.sharing
    watched = Watched(module)
    with division.trial():
        wanted = [t.detach() for t in tensors_of(watched.watch(division.compute, args, kwargs))]
    plan = TensorPlan(watched, group, refuse)
    with division.trial():
        plan.find()
    layers = [*plan.together, *plan.alone]
    if not layers or not agrees(division, plan, layers, (args, kwargs), wanted):
        raise NotDivided(
            f"the layers of `{division.name}` cannot be divided over ranks",
            cause="it gives other outputs where its layers are divided by features"
            if layers
            else "none of its layers is of a kind that can be divided by features",
            hint=f"`--mode shard` divides the memory of any model; or {REPLICATE}",
        )
    return TensorParts(module, group, layers, plan.placements(layers))
