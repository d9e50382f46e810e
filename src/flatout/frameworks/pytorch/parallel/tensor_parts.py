"""How do ranks compute one batch together, each some features of every layer?

In: the layers that are divided, and how. Out: the parameters of a module in parts, and calls of it.
"""

from __future__ import annotations

import functools
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
from flatout.frameworks.pytorch.parallel.tensor_layers import Computing, Layer
from flatout.frameworks.pytorch.trees import tensors_of


class TensorParts(Parts):
    """The parameters of one module, of each divided layer some features.

    Args:
        module: Its parameters are cut now.
        group: All ranks.
        layers: Which are divided.
        portions: How their parameters are cut, by identity.
    """

    def __init__(self, module: nn.Module, group: Group, layers: Sequence[Layer], portions: dict[int, Portions]) -> None:
        super().__init__(module, group, portions, sums=False)
        self._layers = layers
        self.engine = Computing(group)
        self._draws_masks = False
        self._apart = functools.partial(drawn_apart, group.rank)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `Parts`."""
        with computed_in_parts(self._layers, self.engine):
            yield

    def passed(self, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: Any, *, silent: bool) -> Pass:
        """See `HeldByModel`."""
        self._draws_masks = self._draws_masks or pattern.masks
        draws = self._apart if pattern.masks and not silent else nullcontext
        args, kwargs, entered = entering(args, kwargs, [_same] * len(tensors_of((args, kwargs), unique=False)))
        with torch.enable_grad(), self._drawing(draws), self.in_place():
            return Pass(self, compute(*args, **kwargs), entered, draws)

    def evaluated(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `HeldInParts`."""
        self.renew()
        with self._drawing(self._apart if self._draws_masks else nullcontext), self.in_place():
            return compute(*args, **kwargs)

    @contextmanager
    def _drawing(self, draws: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        former, self.engine.draws = self.engine.draws, draws
        try:
            yield
        finally:
            self.engine.draws = former

    def gone_back(self, passed: Pass, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """The gradients of parameters and inputs."""
        pairs = [(o, g) for o, g in zip(passed.leaving, gradients, strict=True) if g is not None and o.requires_grad]
        for tensor in passed.entered:
            tensor.grad = None
        with self._drawing(passed.draws):
            found = self.backward([o for o, _ in pairs], [g for _, g in pairs], keep=keep)
            self.engine.end()
        return found, [tensor.grad for tensor in passed.entered]


class Pass:
    """One call; see `Passed`."""

    def __init__(
        self, held: TensorParts, value: Any, entered: Sequence[torch.Tensor],
        draws: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self.value = value
        self.outputs = tensors_of(value)
        with torch.enable_grad():  # a parameter that is returned as it is keeps its own gradient
            self.leaving = [t.view_as(t) if t.is_leaf and t.requires_grad else t for t in self.outputs]
        self.entered, self.draws = entered, draws
        self._held = held

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """See `Passed`."""
        return self._held.gone_back(self, gradients, keep=keep)


@contextmanager
def computed_in_parts(layers: Sequence[Layer], engine: Computing) -> Iterator[None]:
    """Within, layers compute this rank's features."""
    told = [
        (module, name, getattr(module, name), value) for layer in layers for module, name, value in layer.attributes
    ]
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it reads whole parameters of many modules
    for layer in layers:
        vars(layer.module)["forward"] = engine.forward_of(layer)
    for module, name, _, value in told:
        setattr(module, name, value)
    try:
        yield
    finally:
        engine.end()
        for layer in layers:
            del vars(layer.module)["forward"]
        for module, name, former, _ in told:
            setattr(module, name, former)
        torch.backends.mha.set_fastpath_enabled(is_fast)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
