"""What happens in one call of a model? Which modules are called, in which order, with what, and what is read past them.

In: a call. Out: a record of it; the graph is let go of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from flatout.frameworks.pytorch.parallel.parameter_reads import ParameterReads
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of


class Watched:
    """A call of a module.

    Attributes:
        module: It.
        order: Modules within it, as they were called first.
        calls: Inputs (positional, named) and what was returned, by the identity of a module that was called once.
        outputs: What linear layers returned, each call, by their identity.
        inputs: The shape of what linear layers were given first, by their identity.
        flow: What modules of `calls` were given, and what they returned, by identity: numbers of tensors, in the order
            of `tensors_of`. The same tensor has the same number.
        read_outside: Identities of parameters that are used while another module than their own computes.
        numbers: Of the parameters, in their order, by identity.
        num_elements: Of all parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.order: list[nn.Module] = []
        self.calls: dict[int, tuple[Any, Any, Any]] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self.inputs: dict[int, torch.Size] = {}
        self.flow: dict[int, tuple[list[int], list[int]]] = {}
        self.read_outside: set[int] = set()
        self.numbers = {id(p): number for number, p in enumerate(module.parameters())}
        self.num_elements = sum(p.numel() for p in module.parameters())
        self._within: list[nn.Module] = []
        self._num_calls: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def watch(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call."""
        owners: dict[int, list[nn.Module]] = {}
        for part in self.module.modules():
            for p in part._parameters.values():
                if p is not None:
                    owners.setdefault(id(p), []).append(part)
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._begin).remove)
            stack.callback(register_module_forward_hook(self._end, always_call=True).remove)
            for part in self.module.modules():
                stack.callback(part.register_forward_hook(self._ended, with_kwargs=True).remove)
            stack.callback(self._alive.clear)
            with ParameterReads(owners, lambda one: self._read(owners[one], one)):
                return compute(*args, **kwargs)

    def _read(self, owners: list[nn.Module], parameter: int) -> None:
        """A function of PyTorch's was given a parameter."""
        readers = [one for owner in owners for one in _kin(owner, self._within)]
        if len(owners) > 1 or not self._within or all(self._within[-1] is not one for one in readers):
            self.read_outside.add(parameter)

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._within.append(module)
        if id(module) not in self._num_calls:
            self.order.append(module)
        self._num_calls[id(module)] = self._num_calls.get(id(module), 0) + 1

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        self._within.pop()

    def _ended(self, module: nn.Module, args: Any, kwargs: Any, value: Any) -> None:
        if isinstance(module, nn.Linear):
            self.outputs.setdefault(id(module), []).append(value.detach())
            if args:
                self.inputs.setdefault(id(module), args[0].shape)
        elif any(isinstance(one, nn.Linear) for one in module.modules()):
            if self._num_calls[id(module)] == 1:
                self.calls[id(module)] = map_tensors(torch.Tensor.detach, (args, kwargs, value))
                self.flow[id(module)] = self._numbers((args, kwargs)), self._numbers(value)
            else:
                self.calls.pop(id(module), None)

    def _numbers(self, values: Any) -> list[int]:
        """Tells tensors apart; they live as long as that matters."""
        found = tensors_of(values, unique=False)
        self._alive += found
        return list(map(id, found))


def _kin(owner: nn.Module, within: list[nn.Module]) -> list[nn.Module]:
    """Who may read a module's parameters: itself; attention reads those of its last layer."""
    parents = [one for one in within if isinstance(one, nn.MultiheadAttention) and one.out_proj is owner]
    return [owner, *parents]
