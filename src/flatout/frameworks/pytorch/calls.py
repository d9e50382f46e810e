"""Which calls are the model's, and what happens around them?

The model is found from the optimizers: the modules that own their parameters and have no owner themselves. Such a
module's `_compiled_call_impl` (what `Module.compile` sets; copies and pickles leave it out) becomes an `OuterCall`,
which times the call, and which levers give other ways to compute. A module that training never calls hands over to
its children. In: optimizers. Out: the `OuterCall`s of the models that training calls.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

Compute = Callable[..., Any]
Around = Callable[[Compute, tuple[Any, ...], dict[str, Any]], Any]

MAX_DESCENT = 6
"""Levels of children looked through for the modules that training really calls."""


class CallObserver(Protocol):
    """Who wants to know of outermost calls."""

    def before_call(self, call: OuterCall, training: bool) -> None:
        """A call begins; `training` where gradients will be taken of it."""

    def after_call(self, call: OuterCall, training: bool) -> None:
        """The call is over, also when it raised."""


class OuterCall:
    """The seam in one outermost module.

    Levers set `compute` (another way to compute the same, e.g. compiled) and `arounds` (context and casts around it);
    both are used only where gradients are taken. Evaluation is always computed as the script wrote it.
    """

    def __init__(self, module: nn.Module, owner: Calls, name: str) -> None:
        self.module = module
        self.name = name
        self.plain: Compute = module._compiled_call_impl or module._call_impl
        self.compiled_by_script = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        self.compute: Compute = self.plain
        self.arounds: dict[str, Around] = {}
        self.num_calls = 0
        self.num_training_calls = 0
        self._owner = owner
        self._former = module.__dict__.get("_compiled_call_impl")

    def install(self) -> None:
        """Become the module's call."""
        self.module.__dict__["_compiled_call_impl"] = self

    def remove(self) -> None:
        """Give the module its own call back."""
        if self.module.__dict__.get("_compiled_call_impl") is self:
            if self._former is None:
                del self.module.__dict__["_compiled_call_impl"]
            else:
                self.module.__dict__["_compiled_call_impl"] = self._former

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: observed where it is the outermost, with the levers where gradients are taken."""
        owner = self._owner
        if owner.inside or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        training = torch.is_grad_enabled()
        owner.inside = True
        self.num_calls += 1
        observer = owner.observer
        if observer is not None:
            observer.before_call(self, training)
        try:
            if not training:
                return self.plain(*args, **kwargs)
            self.num_training_calls += 1
            if self.num_training_calls < 10 and torch.is_autocast_enabled(owner.device):
                owner.autocast_seen = True
            if owner.capture is not None:
                return owner.capture(self, args, kwargs)
            return self.with_levers(args, kwargs)
        finally:
            owner.inside = False
            if observer is not None:
                observer.after_call(self, training)

    def with_levers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the call as the engaged levers say."""
        if not self.arounds:
            return self.compute(*args, **kwargs)
        compute = self.compute
        for around in self.arounds.values():
            compute = _nest(around, compute)
        return compute(*args, **kwargs)


def _nest(around: Around, inner: Compute) -> Compute:
    return lambda *args, **kwargs: around(inner, args, kwargs)


class Calls:
    """All outermost calls of a process."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.found: list[OuterCall] = []
        self.inside = False
        self.autocast_seen = False
        """Whether the script calls its model under an autocast of its own."""
        self.observer: CallObserver | None = None
        self.capture: Callable[[OuterCall, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._descents = 0
        self._parameters: set[int] = set()

    def look_for(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Find the outermost modules that own parameters of these optimizers, and install their seam."""
        wanted = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        new = wanted - self._parameters
        if not new:
            return
        self._parameters |= wanted
        known = {id(call.module) for call in self.found}
        for module in _owners(new):
            if id(module) not in known:
                self._add(module, type(module).__name__)
        self._descents = 0

    def settle(self) -> bool:
        """After a step: replace modules that were not called by their children; True once none is left."""
        if self._descents >= MAX_DESCENT:
            self._drop_uncalled()
            return True
        uncalled = [call for call in self.found if not call.num_training_calls]
        if not uncalled:
            return True
        self._descents += 1
        covered = {id(p) for call in self.found if call.num_training_calls for p in call.module.parameters()}
        for call in uncalled:
            open_parameters = [p for p in call.module.parameters() if id(p) in self._parameters - covered]
            if not open_parameters:
                continue
            for name, child in _children(call.module):
                if any(id(p) in self._parameters for p in child.parameters()):
                    self._add(child, f"{call.name}.{name}")
        return False

    def _add(self, module: nn.Module, name: str) -> None:
        if any(call.module is module for call in self.found) or isinstance(module, torch.jit.ScriptModule):
            return
        call = OuterCall(module, self, name)
        call.install()
        self.found.append(call)

    def _drop_uncalled(self) -> None:
        for call in self.found:
            if not call.num_training_calls:
                call.remove()
        self.found = [call for call in self.found if call.num_training_calls]

    def remove(self) -> None:
        """Leave no seam behind."""
        for call in self.found:
            call.remove()
        self.found = []


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # containers that nobody calls
            for inner, grandchild in _children(child):
                yield f"{name}.{inner}", grandchild
        else:
            yield name, child


def _owners(parameters: set[int]) -> list[nn.Module]:
    """Modules with one of these parameters below them and no parent module, in order of creation."""
    modules = [o for o in gc.get_objects() if _is_module(o)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    owners = [m for m in modules if id(m) not in inner]
    return [m for m in owners if any(id(p) in parameters for p in m.parameters())]


def _is_module(value: object) -> bool:
    # type(), not isinstance(): a proxy's __class__ may run code of the user's
    return issubclass(type(value), nn.Module) and "_modules" in getattr(value, "__dict__", {})
