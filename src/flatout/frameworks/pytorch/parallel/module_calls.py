"""How do calls of modules come to be seen, and to go through functions of ours, hooks and all?

In: modules. Out: contexts in which calls, and parameters that functions are given, are told of; a module that the
script has hooked; what happens in one call of a model in which order, where time is the number of module calls that
have begun.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.frameworks.pytorch.observe.flops import flops
from flatout.frameworks.pytorch.parallel.torch_function import OF_THE_OBJECT, SHAPES, flat
from flatout.frameworks.pytorch.seams.trees import tensors_of


@contextmanager
def called_modules() -> Iterator[set[int]]:
    """The identities of the modules that are called within."""
    found: set[int] = set()
    handle = register_module_forward_pre_hook(lambda module, _: found.add(id(module)))
    try:
        yield found
    finally:
        handle.remove()


class ParameterReads(TorchFunctionMode):
    """Within, `read` is told the identity of parameters of some that a function is given."""

    def __init__(self, parameters: Collection[int], read: Callable[[int], None]) -> None:
        super().__init__()
        self._parameters, self._read = parameters, read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Tell of parameters, and compute."""
        if func not in OF_THE_OBJECT and func not in SHAPES:
            for one in flat((args, kwargs or {})):
                if isinstance(one, nn.Parameter) and id(one) in self._parameters:
                    self._read(id(one))
        return func(*args, **(kwargs or {}))


_CALLED = "_compiled_call_impl"
"""What `nn.Module.__call__` calls in the place of a module's hooks and its `forward`, where there is one. The only
attribute of which that is so; PyTorch leaves it out of pickles and copies."""


@contextmanager
def intercepted(given: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within, functions are called in the place of modules; `plainly` makes a call as it would have been made."""
    taken: list[dict[str, Any]] = []
    try:
        for module, function in given:
            own = vars(module)
            if own.get(_CALLED) is None:
                own[_CALLED] = function
                taken.append(own)
        yield
    finally:
        for own in taken:
            del own[_CALLED]


def plainly(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module with its hooks."""
    return module._call_impl(*args, **kwargs)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Within, attention of PyTorch's calls its layers in evaluation, too: its fast path reads parameters of many."""
    former = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(former)


def hooked_module(module: nn.Module) -> str | None:
    """The name of a module within this one that has a hook of the script's; None where there is none."""
    for name, part in module.named_modules():
        tables = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
        hooks = [hook for table in tables for hook in table.values()]
        owners = (str(getattr(hook, "__module__", type(hook).__module__)) for hook in hooks)
        if part is not module and not all(owner.startswith("torch.") for owner in owners):
            return name
    return None


FLOPS_PER_ELEMENT = 50
"""What is only read and written costs as much as so many operations for each element: some ten bytes are moved for
each, and machines compute 5 to 10 operations while they move a byte."""

FLOPS_PER_PARAMETER = 100
"""The same for a parameter's gradient and update in each step."""


@dataclass(slots=True)
class CallRecord:
    """One call of a module, with positional and named arguments, the very objects."""

    module: nn.Module
    begin: int
    inputs: tuple[Any, Any]
    outer: tuple[int, ...]
    """The calls around it, by when they began."""
    value: Any = None
    end: int = 0
    """When it ended: calls that began before are within it."""


class Timeline:
    """A call of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[CallRecord] = []
        """Of modules within it, in the order in which they began."""
        self.reads: dict[int, set[tuple[int, tuple[int, ...]]]] = {}
        """Of each parameter, by identity: when it was computed with, and within which calls."""
        self.costs: list[float] = [0.0]
        """What was computed at each time, in floating-point operations."""
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
            made = CallRecord(module, len(self.calls), (args, kwargs), tuple(self._within))
            self.calls.append(made)
            self.costs.append(0.0)
            self._within.append(made.begin)
            try:
                made.value = plainly(module, args, kwargs)
                return made.value
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
