"""Which modules own a set of parameters? Those with the parameters below them and no parent module.

The heap is looked through, because an optimizer knows parameters and not modules. In: identities of parameters. Out:
modules, in order of creation; beside them those with none. The search is paid for by a share of the run's time, so that
a script that makes a thousand small models is not slowed down.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from time import perf_counter

import torch
from torch import nn

FREE_SEARCH_S = 2.0
"""Seconds of searching that are always allowed."""

SEARCH_SHARE = 0.01
"""Share of the run's time that searching may take beyond that."""


class Owners:
    """Finds owners within a budget."""

    def __init__(self) -> None:
        self._started_s = perf_counter()
        self._spent_s = 0.0

    def of(self, parameters: set[int]) -> tuple[list[nn.Module], list[nn.Module]]:
        """The outermost modules with one of these parameters, and those with none; none where the budget is spent."""
        begun_s = perf_counter()
        if self._spent_s > FREE_SEARCH_S + SEARCH_SHARE * (begun_s - self._started_s):
            return [], []
        found: tuple[list[nn.Module], list[nn.Module]] = [], []
        for module in _outermost():
            found[parameters.isdisjoint(identities(module))].append(module)
        self._spent_s += perf_counter() - begun_s
        return found


def identities(module: nn.Module) -> set[int]:
    """Of the parameters of a module and of all below it."""
    return {id(p) for p in _parameters(module)}


def with_gradients() -> list[torch.Tensor]:
    """Parameters of any module that hold a gradient: what a script trains that has no optimizer we can see."""
    return [p for module in _outermost() for p in _parameters(module) if p.grad is not None]


def num_optimizers() -> int:
    """Optimizers that exist and have something to update, as far as the heap tells."""
    return sum(
        any(p.requires_grad for group in o.param_groups for p in group["params"])
        for o in gc.get_objects()
        if issubclass(type(o), torch.optim.Optimizer) and "param_groups" in getattr(o, "__dict__", {})
    )


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children by name; in place of a container that nobody calls, what it contains."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            for inner, grandchild in children(child):
                yield f"{name}.{inner}", grandchild
        else:
            yield name, child


def _outermost() -> list[nn.Module]:
    modules = [o for o in gc.get_objects() if _is_module(o)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [m for m in modules if id(m) not in inner]


def _is_module(value: object) -> bool:
    # type(), not isinstance(): a proxy's __class__ may run code of the user's
    return issubclass(type(value), nn.Module) and "_modules" in getattr(value, "__dict__", {})


def _parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    # not module.parameters(): a user's own may be overridden, take arguments or raise
    for part in nn.Module.modules(module):
        yield from (p for p in part._parameters.values() if p is not None)
