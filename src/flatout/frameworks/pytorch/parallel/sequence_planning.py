"""Which blocks of a model can compute with some positions on each rank, between layers that are divided by features?

Blocks are looked for from the outside in: what is given a sequence and returns one of the same shape, and holds layers
that go together. Whether it works is tried, forwards and backwards; the exchanges are as large as without. In: a plan
by features that holds. Out: regions, none where nothing holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.confirmation import far
from flatout.frameworks.pytorch.parallel.cuts import entering
from flatout.frameworks.pytorch.parallel.division import ModelDivision
from flatout.frameworks.pytorch.parallel.group import Lost
from flatout.frameworks.pytorch.parallel.protocol import Found
from flatout.frameworks.pytorch.parallel.sequence_region import Key, Region, partial_of
from flatout.frameworks.pytorch.parallel.stand_ins import Swaps, stand_in
from flatout.frameworks.pytorch.parallel.tensor_layers import Computing, Layer
from flatout.frameworks.pytorch.parallel.tensor_plan import TensorPlan, Watched
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.random_states import RandomStates, TorchStates
from flatout.frameworks.pytorch.seams.trees import tensors_of

MOST_TRIES = 12
"""So many divisions of positions are tried for a model: each takes a call and its way back."""

SEED = 7

Computed = tuple[list[torch.Tensor], Found]
"""Outputs and gradients."""


class SequencePlan:
    """Finds the regions of a module.

    Args:
        division: Of the module's calls.
        watched: A call of it.
        plan: How layers are divided by features.
        layers: Which.
        call: What is given in it.
    """

    def __init__(
        self, division: ModelDivision, watched: Watched, plan: TensorPlan, layers: Sequence[Layer], call: Any
    ) -> None:
        self._division, self._watched, self._layers, self._call = division, watched, layers, call
        self._group, self._cuts = division.sharing, plan.portions(layers)
        self._together = {id(layer.module) for layer in layers if layer.kind in ("row", "heads")}
        self._divided = {id(inner) for layer in layers for inner in layer.module.modules()}
        self._states = ModuleState(division.module()), RandomStates()
        self._num_tries = 0

    def find(self) -> list[Region]:
        """Try what may be one."""
        found: list[Region] = []
        wanted: Computed | None = None
        for chain in self._chains():
            if any(block in region for block in chain for region in found):
                continue
            for region in self._candidates(chain):
                if self._num_tries >= MOST_TRIES:
                    return found
                self._num_tries += 1
                wanted = wanted or self._computed(found)
                if self._group.everywhere(self._agrees([*found, region], wanted), "agreement on positions"):
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
        """Whether nobody looks at what is computed within, and every layer of it that is divided is called once."""
        hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules())
        layers = [layer.module for layer in self._layers]
        inner = {id(one) for one in module.modules()}
        once = all(len(self._watched.outputs.get(id(one), (0,))) == 1 for one in layers if id(one) in inner)
        return not hooked and once and "forward" not in vars(module)

    def _following(self, block: nn.Module) -> nn.Module | None:
        """The block of the same kind that gets what one has returned."""
        known = self._watched.flow
        returned = set(known[id(block)][1])
        others = [
            one for one in self._watched.order if type(one) is type(block) and one is not block and id(one) in known
        ]
        return next((one for one in others if returned & set(known[id(one)][0]) and self._may_be_block(one)), None)

    def _candidates(self, chain: list[nn.Module]) -> Iterator[Region]:
        """Ways of cutting what a chain is given: the longer dimension first; whole scopes where that must be."""
        args, kwargs, value = self._watched.calls[id(chain[0])]
        shapes = {t.shape for t in tensors_of(value)}
        given = tensors_of((args, kwargs))
        number = next(place for place, tensor in enumerate(given) if _is_sequence(tensor, shapes))
        shape = given[number].shape
        world = self._group.world
        dims = [dim for dim in range(len(shape) - 1) if not shape[dim] % world and shape[dim] >= world]
        scopes = {which: self._scopes(chain, every=which) for which in (False, True)}
        for dim in sorted(dims, key=lambda dim: -shape[dim]):
            for which in (False, True) if scopes[False] != scopes[True] else (False,):
                if not any(id(block) in map(id, scopes[which]) for block in chain):
                    yield Region(chain, number, dim, scopes[which], self._group, self._shapes(chain))

    def _scopes(self, chain: Sequence[nn.Module], *, every: bool) -> list[nn.Module]:
        """Modules that are to be given all positions: those that are told a number of heads, or all with a pair."""
        inner = {id(one) for block in chain for one in block.modules()}
        found: dict[int, nn.Module] = {}
        for layer in self._layers:
            if layer.scope is not None and id(layer.module) in inner and (every or layer.attributes):
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

    # -- tries -------------------------------------------------------------------------------------------------------

    def _agrees(self, regions: Sequence[Region], wanted: Computed) -> bool:
        try:
            found = self._computed(regions)
        except Lost:
            raise
        except Exception:  # noqa: BLE001  a wrong guess may raise anything
            return False
        (outputs, gradients), (wanted_outputs, wanted_gradients) = found, wanted
        same = len(outputs) == len(wanted_outputs) and all(map(assembly.is_close, outputs, wanted_outputs))
        most = 10 * max((assembly.tolerance(t.dtype) for t in outputs), default=0.0)
        return same and not far(gradients, wanted_gradients, most)

    def _computed(self, regions: Sequence[Region]) -> Computed:
        """Outputs, and the gradients of parameters from some that are drawn for the outputs."""
        for state in self._states:
            state.restore()
        module, group = self._division.module(), self._group
        own = list(module.parameters())
        held = {id(p): self._cuts[id(p)].mine(p) if id(p) in self._cuts else p for p in own}
        leaves = {which: stand_in(part.detach().clone()) for which, part in held.items()}  # graphs may live on
        partial = partial_of(regions, self._cuts)
        engine = Computing(group, self._layers, regions)
        engine.draws = functools.partial(_drawing_others, group.rank)
        given, named = self._call
        args, kwargs, _ = entering(given, named, itertools.repeat(lambda whole: whole))
        with torch.enable_grad(), Swaps.of(module, leaves).made(), engine.in_parts():
            outputs = tensors_of(self._division.compute(*args, **kwargs))
            trained = [t for t in outputs if t.requires_grad]
            used = [leaves[id(p)] for p in own if p.requires_grad]
            found = torch.autograd.grad(trained, used, list(map(_drawn_like, trained)), allow_unused=True)
        gradients = zip((id(p) for p in own if p.requires_grad), found, strict=True)
        summed: Found = [
            g if g is None or which not in partial else group.sum(g.contiguous(), "agreement on positions")
            for which, g in gradients
        ]
        return [t.detach() for t in outputs], summed


@contextmanager
def _drawing_others(rank: int) -> Iterator[None]:
    """Noise of a model's own is another one on each rank within, and so found out; nothing is drawn outside."""
    outside = TorchStates()
    torch.manual_seed(SEED + rank)
    try:
        yield
    finally:
        outside.restore()


def _is_sequence(tensor: torch.Tensor, shapes: set[torch.Size]) -> bool:
    return tensor.dim() >= 3 and tensor.is_floating_point() and tensor.shape in shapes


def _drawn_like(tensor: torch.Tensor) -> torch.Tensor:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(tensor.shape, generator=generator).to(tensor)
