"""Which blocks of a model can compute with some positions on each rank, between layers that are divided by features?

Blocks are looked for from the outside in: what is given a sequence and returns one of the same shape, and holds layers
that go together. Whether it works is tried; gradients are compared when the script goes back through its first call.
In: a plan by features that holds. Out: regions, none where nothing holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.division import ModelDivision
from flatout.frameworks.pytorch.parallel.sequence_region import Key, Region
from flatout.frameworks.pytorch.parallel.tensor_layers import Layer
from flatout.frameworks.pytorch.parallel.tensor_plan import TensorPlan, Watched, agrees
from flatout.frameworks.pytorch.seams.trees import tensors_of

MOST_TRIES = 12
"""So many divisions of positions are tried for a model: each takes a call."""


class SequencePlan:
    """Finds the regions of a module, by a call of it and how layers are divided by features."""

    def __init__(
        self, division: ModelDivision, watched: Watched, plan: TensorPlan, layers: Sequence[Layer], call: Any,
        wanted: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._division, self._watched, self._layers, self._call = division, watched, layers, call
        self._group, self._plan, self._wanted = division.sharing, plan, wanted
        self._together = {id(layer.module) for layer in layers if layer.kind in ("row", "heads")}
        self._divided = {id(inner) for layer in layers for inner in layer.module.modules()}
        self._num_tries = 0

    def find(self) -> list[Region]:
        """Try what may be one."""
        found: list[Region] = []
        for chain in self._chains():
            if any(block in region for block in chain for region in found):
                continue
            for region in self._candidates(chain):
                if self._num_tries >= MOST_TRIES:
                    return found
                self._num_tries += 1
                if agrees(self._division, self._plan, self._layers, self._call, self._wanted, [*found, region]):
                    region.settle()
                    found.append(region)
                    break
        return found

    def _chains(self) -> Iterator[list[nn.Module]]:
        """The model, and blocks of one kind side by side, outer ones first: one is given what another has returned."""
        whole = self._watched.module
        for siblings in [[whole], *(list(parent.children()) for parent in whole.modules())]:
            for kind, run in itertools.groupby(siblings, lambda one: type(one) if self._may_be_block(one) else None):
                if kind is not None:
                    yield list(run)

    def _may_be_block(self, module: nn.Module) -> bool:
        """Whether it returns a sequence like one that it is given, and layers that go together are within.

        Its `forward` must be its class's, every layer of it that is divided called once, and something gained by it:
        norms, which have parameters.
        """
        if id(module) not in self._watched.calls or id(module) in self._together or "forward" in vars(module):
            return False
        args, kwargs, value = self._watched.calls[id(module)]
        shapes = {t.shape for t in tensors_of(value)}
        inner = {id(one) for one in module.modules()}
        whole = any(m._parameters for m in module.modules() if id(m) not in self._divided)
        given = any(_is_sequence(t, shapes) for t in tensors_of((args, kwargs)))
        layers = (id(layer.module) for layer in self._layers)
        once = all(len(self._watched.outputs.get(one, (0,))) == 1 for one in layers if one in inner)
        return bool(inner & self._together) and whole and given and once

    def _candidates(self, chain: list[nn.Module]) -> Iterator[Region]:
        """Ways of cutting what a chain is given, the longer dimension first."""
        args, kwargs, value = self._watched.calls[id(chain[0])]
        shapes = {t.shape for t in tensors_of(value)}
        given = tensors_of((args, kwargs))
        number = next(place for place, tensor in enumerate(given) if _is_sequence(tensor, shapes))
        shape, world = given[number].shape, self._group.world
        dims = [dim for dim in range(len(shape) - 1) if not shape[dim] % world and shape[dim] >= world]
        inner = {id(one) for block in chain for one in block.modules()}
        told = (layer.scope for layer in self._layers if id(layer.module) in inner and layer.attributes)
        # what is told a number of heads is to be given all positions
        scopes = list({id(scope): scope for scope in told if scope is not None}.values())
        if not any(block is scope for block in chain for scope in scopes):
            for dim in sorted(dims, key=lambda dim: -shape[dim]):
                yield Region(chain, number, dim, scopes, self._group, self._shapes(inner))

    def _shapes(self, inner: set[int]) -> dict[Key, torch.Size]:
        """Of what modules were given and returned when whole."""
        shapes: dict[Key, torch.Size] = {}
        for which, (args, kwargs, value) in self._watched.calls.items():
            if which not in inner:
                continue
            given: Any = (args, kwargs)
            if which in self._together:  # attention: no masks
                names = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
                given = names.get("query"), names.get("key"), names.get("value")
            shapes |= {(which, "given", n): t.shape for n, t in enumerate(tensors_of(given))}
            shapes |= {(which, "returned", n): t.shape for n, t in enumerate(tensors_of(value))}
        return shapes | {(one, "given", 0): s for one, s in self._watched.inputs.items() if one in inner}


def _is_sequence(tensor: torch.Tensor, shapes: set[torch.Size]) -> bool:
    return tensor.dim() >= 3 and tensor.is_floating_point() and tensor.shape in shapes
