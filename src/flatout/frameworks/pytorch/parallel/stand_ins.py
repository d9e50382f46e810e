"""With what does a module compute in the place of its parameters, and how do these move into the memory of a part?

Leaves share the memory of what this rank has of parameters; they are in the module for the time of a call, so that its
graph ends there, not at the script's own objects. In: a module, or a parameter and its part. Out: stand-ins, in place
within a context; the parameter as `Sharded`, or a refusal, where somebody holds on to the memory that it leaves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import REPLICATE, Placement, become, part_of
from flatout.frameworks.pytorch.parallel.torch_function import hook_of_wholes


class StandIns:
    """Stand-ins for the parameters of one module.

    `frozen`: those that are not trained have one, too, where parameters are not what the module is to compute with.
    """

    def __init__(self, module: nn.Module, *, frozen: bool = False) -> None:
        self._frozen = frozen
        self._module = weakref.ref(module)
        self.parameters: list[nn.Parameter] = []
        self.every: list[nn.Parameter] = []
        """The stand-in of each."""
        self._states: tuple[Any, ...] = ()
        self._swaps: Swaps | None = None

    @property
    def module(self) -> nn.Module:
        """Whose parameters they stand for."""
        module = self._module()
        if module is None:
            raise ReferenceError("the model is gone")
        return module

    def renew(self) -> bool:
        """Follow what the script has done to the parameters since the last call; whether there are new stand-ins."""
        parameters = list(self.module.parameters())
        states = tuple((id(p), p.data_ptr(), p.requires_grad, p.stride()) for p in parameters)
        if states == self._states:
            return False
        moved = tuple(s[:2] for s in states) != tuple(s[:2] for s in self._states)
        self._states = states
        if moved:
            self.parameters = parameters
            self.every = [stand_in(p) for p in parameters]
        by_id: dict[int, torch.Tensor] = {
            id(p): one if p.requires_grad else one.detach()
            for p, one in zip(self.parameters, self.every, strict=True) if p.requires_grad or self._frozen
        }  # fmt: skip
        self._swaps = Swaps(self.module, by_id)
        return moved

    @property
    def used(self) -> list[nn.Parameter]:
        """Those of the parameters that are trained."""
        return [one for p, one in zip(self.parameters, self.every, strict=True) if p.requires_grad]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module computes with them."""
        assert self._swaps is not None
        with self._swaps.made():
            yield


class Swaps:
    """What is put into a module and all within it, in the place of parameters that are told by their identity."""

    def __init__(self, module: nn.Module, by_id: Mapping[int, torch.Tensor]) -> None:
        self._swaps: list[tuple[Any, Any, Any, Any]] = []
        """Containers, keys in them, what is put there, and what was there."""
        for part in module.modules():
            own, flat = part._parameters, vars(part).get("_flat_weights")
            if not isinstance(own, dict):
                raise NotDivided(
                    f"`{type(part).__name__}` cannot be divided over ranks", cause="its parameters are not Python's"
                )
            places: list[tuple[Any, Any, Any]] = [(own, name, p) for name, p in own.items()]
            if isinstance(flat, list):  # recurrent modules compute with a list of their own
                places += [(flat, place, p) for place, p in enumerate(flat)]
            self._swaps += [(one, key, by_id[id(p)], p) for one, key, p in places if id(p) in by_id]

    @contextmanager
    def made(self) -> Iterator[None]:
        """They are there within."""
        for container, key, new, _ in self._swaps:
            container[key] = new
        try:
            yield
        finally:
            for container, key, _, old in self._swaps:
                container[key] = old


def refuse_others(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Make sure that a module still has the parameters that ranks hold parts of; or `NotDivided`."""
    if list(map(id, module.parameters())) != list(map(id, parameters)):
        raise NotDivided(
            "a model's parameters were replaced by others in training",
            cause=f"`{type(module).__name__}` had {len(parameters)}, which are divided over ranks",
            hint=REPLICATE,
        )


def stand_in(parameter: torch.Tensor) -> nn.Parameter:
    """A leaf in the memory of what this rank has of a parameter."""
    return nn.Parameter(part_of(parameter), parameter.is_floating_point() or parameter.is_complex())


def _num_sharing(tensor: torch.Tensor) -> int:
    """How many tensors lie in its memory, and those that count."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


@functools.cache
def _num_sharing_of_one() -> int:
    """The same of a parameter that nobody shares but its stand-in (`gradients.py`)."""
    alone = nn.Parameter(torch.zeros(1))
    pair = alone, stand_in(alone)
    return _num_sharing(pair[0])


def take_place(parameter: nn.Parameter, part: torch.Tensor, placement: Placement, moved: Any = None) -> None:
    """The script's parameter, whole until now, moves into the memory of its part; `moved`: see `become`."""
    if _num_sharing(parameter) > _num_sharing_of_one():
        raise NotDivided(
            "a parameter cannot be sharded: its memory is shared with another tensor",
            cause=f"one of shape {tuple(parameter.shape)} is shared with another tensor that the script keeps "
            "(`p.data`, a state dict, a view), which would not follow it",
            hint=f"copy what is kept before training (`copy.deepcopy`); or {REPLICATE}",
        )
    grad, parameter.grad = parameter.grad, None
    parameter.data = part
    accumulates = parameter.view_as(parameter).grad_fn
    before = accumulates is not None and accumulates.next_functions[0][0]
    if before and tuple(before._input_metadata[0].shape) != tuple(parameter.shape):  # type: ignore[union-attr]
        raise NotDivided(
            "a parameter cannot be sharded: a graph hangs from it already",
            cause=f"something was computed from one of shape {tuple(placement.shape)} before the first call of "
            "the model",
            hint=f"compute penalties after the model's call; or {REPLICATE}",
        )
    hooks = parameter._backward_hooks
    for key, hook in (hooks or {}).items():
        hooks[key] = hook_of_wholes(hook, placement)  # type: ignore[index]
    become(parameter, placement, moved)
    if grad is not None:
        parameter.grad = grad
