"""How do the gradients of parameters come to be those of the whole batch?

Within a divided call the module computes with aliases of its parameters, leaves that share their memory, and the
reducer of PyTorch's DistributedDataParallel sums the aliases' gradients over ranks, in buckets, beside the backward
pass. The parameters themselves get the sums from the call's node in the script's graph: so hooks of the script's own,
penalties that it adds to its loss, accumulated gradients and `torch.autograd.grad` see what one process sees. In: a
module. Out: its aliases in place for a call, and summed gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Found
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.summing import Summing

T = TypeVar("T", bound=torch.Tensor)


class Aliases:
    """Stand-ins for the parameters of one module."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._module = weakref.ref(module)
        self._group = group
        self.parameters: list[nn.Parameter] = []
        self._aliases: list[nn.Parameter] = []
        self._states: tuple[Any, ...] = ()
        self._swaps: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any], list[Any]]] = []
        self._summings: dict[tuple[bool, ...], Summing] = {}

    def renew(self) -> None:
        """Follow what the script has done to the module's parameters since the last call."""
        parameters = list(self._of().parameters())
        states = tuple((id(p), p.data_ptr(), p.requires_grad, p.stride()) for p in parameters)
        if states == self._states:
            return
        moved = tuple(s[:2] for s in states) != tuple(s[:2] for s in self._states)
        self._states = states
        if moved:
            self.parameters = parameters
            self._aliases = [_alias(p) for p in parameters]
            self._summings.clear()
        self._swaps, self._lists = self._plan()

    @property
    def used(self) -> list[nn.Parameter]:
        """The aliases of the parameters that are trained."""
        return [a for p, a in zip(self.parameters, self._aliases, strict=True) if p.requires_grad]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """See `Held`."""
        return list(self.used)

    def at_once(self) -> AbstractContextManager[None]:
        """See `Held`: they are."""
        return nullcontext()

    def _of(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the model is gone")
        return module

    def _plan(self) -> tuple[list[Any], list[Any]]:
        by_id = {id(p): a for p, a in zip(self.parameters, self._aliases, strict=True) if p.requires_grad}
        swaps, lists = [], []
        for part in self._of().modules():
            own = part._parameters
            if not isinstance(own, dict):
                raise NotDivided(
                    f"`{type(part).__name__}` cannot be divided over ranks", cause="its parameters are not Python's",
                )  # fmt: skip
            new = {name: by_id[id(p)] for name, p in own.items() if p is not None and id(p) in by_id}
            if new:
                swaps.append((own, new, {name: own[name] for name in new}))
            flat = part.__dict__.get("_flat_weights")
            if isinstance(flat, list):  # recurrent modules compute with a list of their own
                lists.append((flat, [by_id.get(id(p), p) for p in flat], list(flat)))
        return swaps, lists

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module computes with aliases."""
        for own, new, _ in self._swaps:
            own.update(new)
        for flat, new_list, _ in self._lists:
            flat[:] = new_list
        try:
            yield
        finally:
            for own, _, old in self._swaps:
                own.update(old)
            for flat, _, old_list in self._lists:
                flat[:] = old_list

    @contextmanager
    def nudged(self, times: int) -> Iterator[None]:
        """Aliases are moved by `times` their last bit, at random; the parameters stay."""
        try:
            for alias, factor in with_factors(self.used, times):
                alias.data = alias.data * factor
            yield
        finally:
            for parameter, alias in zip(self.parameters, self._aliases, strict=True):
                if parameter.requires_grad:
                    alias.data = parameter.detach()

    def close(self) -> None:
        """See `Held`."""
        self._summings.clear()

    def gradients(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *,
        summed: bool,
    ) -> tuple[Found, Found]:  # fmt: skip
        """See `Held`; those of inputs are not summed."""
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
        summed = iter(self._summing().gone_back(outputs, gradients, keep=keep))
        return [next(summed) if parameter.requires_grad else None for parameter in self.parameters]

    def _summing(self) -> Summing:
        """What sums the gradients of those that are trained now: a script may switch some off and on again."""
        trained = tuple(parameter.requires_grad for parameter in self.parameters)
        if trained not in self._summings:
            self._summings[trained] = Summing(self.used, self._group)
        return self._summings[trained]


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), requires_grad=parameter.is_floating_point() or parameter.is_complex())


def with_factors(tensors: Iterable[T], times: int) -> Iterator[tuple[T, torch.Tensor]]:
    """Each tensor with factors that move it by up to `times` its last bit; the same ones for the same `times`."""
    generator = torch.Generator()
    generator.manual_seed(times)
    for tensor in tensors:
        noise = torch.rand(tensor.shape, generator=generator).mul_(2).sub_(1).to(tensor.device)
        yield tensor, (1 + noise * times * torch.finfo(tensor.dtype).eps).to(tensor.dtype)
