"""Which blocks of a model can compute with some positions on each rank, between layers that are divided by features?

Blocks are looked for from the outside in: what is given a sequence and returns one of the same shape, and holds layers
that go together. Whether it works is tried; gradients are compared when the script goes back through its first call.
In: a plan by features that holds. Out: regions, none where nothing holds.
"""

from __future__ import annotations

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

    # -- what may be one ---------------------------------------------------------------------------------------------

    def _chains(self) -> Iterator[list[nn.Module]]:
        """Blocks, each of which is given what the one before has returned; outer ones first."""
        seen: set[int] = set()
        for module in self._watched.module.modules():
            if id(module) in seen or not self._may_be_block(module):
                continue
            chain = [module]
            while (following := self._following(chain[-1])) is not None:
                chain.append(following)
            seen.update(map(id, chain))
            yield chain

    def _may_be_block(self, module: nn.Module) -> bool:
        """Whether it returns a sequence like one that it is given, and layers that go together are within."""
        if id(module) not in self._watched.calls or id(module) in self._together or not self._is_plain(module):
            return False
        args, kwargs, value = self._watched.calls[id(module)]
        shapes = {t.shape for t in tensors_of(value)}
        inner = {id(one) for one in module.modules()}
        whole = any(m._parameters for m in module.modules() if id(m) not in self._divided)  # norms: something is gained
        given = any(_is_sequence(t, shapes) for t in tensors_of((args, kwargs)))
        return bool(inner & self._together) and whole and given

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether its `forward` is its class's, and every layer of it that is divided is called once."""
        layers = [layer.module for layer in self._layers]
        inner = {id(one) for one in module.modules()}
        once = all(len(self._watched.outputs.get(id(one), (0,))) == 1 for one in layers if id(one) in inner)
        return once and "forward" not in vars(module)

    def _following(self, block: nn.Module) -> nn.Module | None:
        """The block of the same kind that gets what one has returned."""
        known = self._watched.flow
        returned = set(known[id(block)][1])
        others = [
            one for one in self._watched.order if type(one) is type(block) and one is not block and id(one) in known
        ]
        return next((one for one in others if returned & set(known[id(one)][0]) and self._may_be_block(one)), None)

    def _candidates(self, chain: list[nn.Module]) -> Iterator[Region]:
        """Ways of cutting what a chain is given, the longer dimension first."""
        args, kwargs, value = self._watched.calls[id(chain[0])]
        shapes = {t.shape for t in tensors_of(value)}
        given = tensors_of((args, kwargs))
        number = next(place for place, tensor in enumerate(given) if _is_sequence(tensor, shapes))
        shape = given[number].shape
        world = self._group.world
        dims = [dim for dim in range(len(shape) - 1) if not shape[dim] % world and shape[dim] >= world]
        scopes = self._scopes(chain)
        if any(block is scope for block in chain for scope in scopes):
            return
        for dim in sorted(dims, key=lambda dim: -shape[dim]):
            yield Region(chain, number, dim, scopes, self._group, self._shapes(chain))

    def _scopes(self, chain: Sequence[nn.Module]) -> list[nn.Module]:
        """Modules that are to be given all positions: those that are told a number of heads."""
        inner = {id(one) for block in chain for one in block.modules()}
        found: dict[int, nn.Module] = {}
        for layer in self._layers:
            if layer.scope is not None and id(layer.module) in inner and layer.attributes:
                found[id(layer.scope)] = layer.scope
        return list(found.values())

    def _shapes(self, chain: Sequence[nn.Module]) -> dict[Key, torch.Size]:
        """Of what modules were given and returned when whole."""
        inner = {id(one) for block in chain for one in block.modules()}
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
