"""What does a module return that is not computed here? Tensors of the right shapes, without a number in them.

Shapes are found with tensors that have no memory, once for each kind of inputs. In: a module and its inputs. Out: what
it would return, but for the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.skeleton import skeleton
from flatout.frameworks.pytorch.parallel.stand_ins import Swaps
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

Shapes = Mapping[tuple[int, str], torch.Size]
"""Of whole parameters, by the identity of their module and their name in it."""


def shapes_of(module: nn.Module) -> dict[tuple[int, str], torch.Size]:
    """Shapes of whole parameters."""
    return {
        (id(part), name): p.shape
        for part in module.modules() for name, p in part._parameters.items() if p is not None
    }  # fmt: skip


class Placeholders:
    """What modules would return.

    Args:
        shapes: Of parameters: this rank may have none of their memory.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._known: dict[Any, Any] = {}

    def of(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a call returns; it raises what the module raises that looks at numbers."""
        given = tensors_of((args, kwargs), unique=False)
        shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in given)
        key = (id(module), module.training, skeleton((args, kwargs)), shapes)
        if key not in self._known:
            self._known[key] = self._found(module, args, kwargs)
        return map_tensors(_nothing, self._known[key])

    def _found(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes 0.5 s to load

        whole = {
            id(p): (self._shapes[id(part), name], p)
            for part in module.modules() for name, p in part._parameters.items() if p is not None
        }  # fmt: skip
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = {one: torch.empty(shape, dtype=p.dtype, device=p.device) for one, (shape, p) in whole.items()}
            args, kwargs = map_tensors(mode.from_tensor, (args, kwargs))
            kept = ModuleState(module)
            try:
                with Swaps.of(module, fake).made():
                    value = module._call_impl(*args, **kwargs)
            finally:
                kept.restore()
            devices = [t.device for t in tensors_of(value)]
        places = iter(devices)
        return map_tensors(lambda t: _Shape.of(t, next(places)), value)


class _Shape(torch.Tensor):
    """A tensor without memory, which knows where it would be."""

    place: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor, place: torch.device) -> _Shape:
        """That of another one."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(cls)
        found.place = place
        return found


def _nothing(shape: Any) -> torch.Tensor:
    if not isinstance(shape, _Shape):  # a constant of the module's own
        return shape
    with torch._C.DisableTorchFunctionSubclass():
        if shape.is_floating_point():  # so that what reads it shows, also what multiplies it by zero
            return torch.full(shape.shape, math.nan, dtype=shape.dtype, device=shape.place)
        return torch.zeros(shape.shape, dtype=shape.dtype, device=shape.place)
