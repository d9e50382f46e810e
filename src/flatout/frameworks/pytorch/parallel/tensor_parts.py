"""How do ranks compute one batch together, each some features of every layer?

In: the layers that are divided, and how. Out: the parameters of a module in parts, and calls of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.cuts import entering
from flatout.frameworks.pytorch.parallel.draws import drawn_apart
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Found
from flatout.frameworks.pytorch.parallel.parts import Parts
from flatout.frameworks.pytorch.parallel.portions import Portions
from flatout.frameworks.pytorch.parallel.sequence_region import Region, partial_of
from flatout.frameworks.pytorch.parallel.tensor_layers import Computing, Layer
from flatout.frameworks.pytorch.seams.trees import tensors_of


class TensorParts(Parts):
    """The parameters of one module, of each divided layer some features.

    Args:
        module: Its parameters are cut now.
        group: All ranks.
        layers: Which are divided.
        regions: Blocks whose positions are divided between them.
        portions: How their parameters are cut, by identity.
    """

    def __init__(
        self, module: nn.Module, group: Group, layers: Sequence[Layer], regions: Sequence[Region],
        portions: dict[int, Portions],
    ) -> None:  # fmt: skip
        super().__init__(module, group, portions, partial_of(regions, portions), are_alike=True)
        self.engine = Computing(group, layers, regions)
        self._draws_masks = False
        self._apart = functools.partial(drawn_apart, group.rank)

    def computing(self) -> AbstractContextManager[None]:
        """See `Parts`."""
        return self.engine.in_parts()

    def passed(self, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: Any, *, silent: bool) -> Pass:
        """See `HeldByModel`."""
        self._draws_masks = self._draws_masks or pattern.masks
        draws = self._apart if pattern.masks and not silent else nullcontext
        args, kwargs, entered = entering(args, kwargs, itertools.repeat(lambda whole: whole))
        with torch.enable_grad(), self.drawing(draws), self.in_place():
            return Pass(self, compute(*args, **kwargs), entered, draws)

    def evaluated(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `HeldInParts`."""
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


class Pass:
    """One call; see `Passed`."""

    def __init__(
        self, held: TensorParts, value: Any, entered: Sequence[torch.Tensor],
        draws: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self.value = value
        self.outputs = tensors_of(value)
        with torch.enable_grad():  # a parameter that is returned as it is keeps its own gradient
            self._leaving = [t.view_as(t) if t.is_leaf and t.requires_grad else t for t in self.outputs]
        self._entered, self._draws = entered, draws
        self._held = held

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """See `Passed`."""
        held = self._held
        pairs = [(o, g) for o, g in zip(self._leaving, gradients, strict=True) if g is not None and o.requires_grad]
        for tensor in self._entered:
            tensor.grad = None
        with held.drawing(self._draws):
            found = held.backward([o for o, _ in pairs], [g for _, g in pairs], keep=keep)
            held.engine.end()
        return found, [tensor.grad for tensor in self._entered]
