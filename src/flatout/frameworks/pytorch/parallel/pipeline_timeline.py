"""What happens in one call of a model, in which order? Calls of its modules, what they cost, parameters that are read.

In: a call. Out: a record of it, in which time is the number of module calls that have begun.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.frameworks.pytorch.observe.flops import flops
from flatout.frameworks.pytorch.parallel.intercepted import intercepted, plainly
from flatout.frameworks.pytorch.parallel.parameter_reads import ParameterReads
from flatout.frameworks.pytorch.seams.trees import tensors_of

FLOPS_PER_ELEMENT = 50
"""What is only read and written costs as much as so many operations for each element: some ten bytes are moved for
each, and machines compute 5 to 10 operations while they move a byte."""

FLOPS_PER_PARAMETER = 100
"""The same for a parameter's gradient and update in each step."""


@dataclass(slots=True)
class Made:
    """One call of a module.

    Attributes:
        module: It.
        begin: When it began.
        inputs: Positional and named arguments, the very objects.
        outer: The calls around it, by when they began.
        end: When it ended: calls that began before are within it.
    """

    module: nn.Module
    begin: int
    inputs: tuple[Any, Any]
    outer: tuple[int, ...]
    end: int = 0


class Timeline:
    """A call of a module.

    Attributes:
        module: It.
        calls: Of modules within it, in the order in which they began.
        reads: Of each parameter, by identity: when it was computed with, and within which calls.
        costs: What was computed at each time, in floating-point operations.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[Made] = []
        self.reads: dict[int, set[tuple[int, tuple[int, ...]]]] = {}
        self.costs: list[float] = [0.0]
        self._within: list[int] = []

    def watch(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call, as one process does."""
        sizes = {id(p): p.numel() for p in self.module.parameters()}
        inner = [part for part in self.module.modules() if part is not self.module]
        with ExitStack() as stack:
            stack.enter_context(intercepted((part, self._through(part)) for part in inner))
            stack.enter_context(ParameterReads(sizes, lambda one: self._read(one, sizes)))
            stack.enter_context(_Costs(self._spend))
            return compute(*args, **kwargs)

    def before(self, time: int) -> float:
        """What was computed until the call that began then."""
        return sum(itertools.islice(self.costs, time + 1))

    def tensors_at(self, time: int) -> list[torch.Tensor]:
        """What the call that began then was given."""
        return tensors_of(self.calls[time].inputs, unique=False)

    def _through(self, module: nn.Module) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            made = Made(module, len(self.calls), (args, kwargs), tuple(self._within))
            self.calls.append(made)
            self.costs.append(0.0)
            self._within.append(made.begin)
            try:
                return plainly(module, args, kwargs)
            finally:
                self._within.pop()
                made.end = len(self.calls)

        return called

    def _read(self, parameter: int, sizes: dict[int, int]) -> None:
        if parameter not in self.reads:
            self._spend(FLOPS_PER_PARAMETER * sizes[parameter])
        self.reads.setdefault(parameter, set()).add((len(self.calls), tuple(self._within)))

    def _spend(self, num_flops: float) -> None:
        self.costs[-1] += num_flops


class _Costs(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self, spend: Callable[[float], None]) -> None:
        super().__init__()
        self._spend = spend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and count."""
        found = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            moved = sum(one.numel() for one in tensors_of(found))
            self._spend((flops(func, args, kwargs or {}, found) or 0) + FLOPS_PER_ELEMENT * moved)
        return found
