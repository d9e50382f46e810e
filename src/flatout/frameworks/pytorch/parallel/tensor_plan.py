"""Which layers of a model can be divided by features, and which of them need no exchange in between?

A call of the model is watched: which layers are called in which order, and which parameters are read past their layers.
Layers of known kinds can be divided by themselves. Whether some of them go together is tried: the first ones give some
features only, and what the last one makes of them must add up to what it gave before. In: a module and a call. Out: the
layers, and how their parameters are cut.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.cuts import bounds
from flatout.frameworks.pytorch.parallel.group import Group, Lost
from flatout.frameworks.pytorch.parallel.module_calls import CallRecord, Timeline
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import Placement, can_be_cut, part_of
from flatout.frameworks.pytorch.parallel.stand_ins import Swaps, stand_in
from flatout.frameworks.pytorch.parallel.tensor_layers import Computing, Kind, Layer, replaced
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.division import Division


class Watched:
    """A call of a module: what was given, returned and read in it, by the identity of modules and parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.order: list[nn.Module] = []
        """Modules within it, as they were called first."""
        self.calls: dict[int, tuple[Any, Any, Any]] = {}
        """Inputs (positional, named) and what was returned, of modules that were called once."""
        self.outputs: dict[int, list[torch.Tensor]] = {}
        """What linear layers returned, each call."""
        self.read_outside: set[int] = set()
        """Parameters that are used while another module than their own computes."""
        self.numbers = {id(p): number for number, p in enumerate(module.parameters())}

    def watch(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call."""
        timeline = Timeline(self.module)
        value = timeline.watch(compute, args, kwargs)
        calls = [CallRecord(self.module, 0, (args, kwargs), (), value), *timeline.calls]
        nums = Counter(id(call.module) for call in calls)
        self.order = list({id(call.module): call.module for call in calls}.values())
        for call in calls:
            which, given, returned = id(call.module), call.inputs, call.value
            if isinstance(call.module, nn.Linear):
                self.outputs.setdefault(which, []).append(returned.detach())
            elif nums[which] == 1 and any(isinstance(one, nn.Linear) for one in call.module.modules()):
                self.calls[which] = map_tensors(torch.Tensor.detach, (*given, returned))
        for part in self.module.modules():
            for p in (one for one in part._parameters.values() if one is not None):
                for _, within in timeline.reads.get(id(p), ()):
                    reader = timeline.calls[within[-1]].module if within else self.module
                    is_last = isinstance(reader, nn.MultiheadAttention) and reader.out_proj is part
                    if reader is not part and not is_last:  # attention reads the parameters of its last layer
                        self.read_outside.add(id(p))  # so is what two modules share
        return value


LEAST_SHARE = 0.01
"""A layer with less of the model's parameters is not worth an exchange by itself."""

LEAST_PRODUCTS = 32
"""A layer by itself is worth an exchange from so many products for each feature that is exchanged, where others are
divided at all: about where a core's 20 GFLOP/s and 1 GB/s between processes break even, three products in a step."""

Told = tuple[nn.Module, str, int]
"""A module, the name of an attribute of it, its value on one rank."""


class TensorPlan:
    """Finds how a module is divided, by a call of it; `refuse` is for placements."""

    def __init__(self, watched: Watched, group: Group, refuse: Callable[[NotDivided], Any]) -> None:
        self._watched, self.group, self._refuse = watched, group, refuse
        self._module = watched.module
        self._usable = [one for one in watched.order if self._is_usable(one)]
        self.together: list[Layer] = []
        """Layers that need no exchange in between."""
        self.alone: list[Layer] = []
        """Others."""

    def find(self) -> None:
        """Try what goes together; the rest is divided alone."""
        self.together = [Layer(one, "heads") for one in self._usable if self._has_heads(one)]
        taken = {id(inner) for layer in self.together for inner in layer.module.modules()}
        free = [one for one in self._usable if _is_linear(one) and id(one) not in taken]
        for scope in list(self._module.modules())[::-1]:  # inner ones first
            inside = {id(one) for one in scope.modules()} - taken
            near, first = [one for one in free if id(one) in inside], 0
            while first < len(near) - 1:  # neighbours among the layers that a module calls
                num = next((n for n in (4, 3, 2) if self._try(scope, near[first : first + n], n)), 1)
                taken.update(id(one) for one in near[first : first + num] if num > 1)
                first += num
        rest = [(one, self._kind_alone(one)) for one in self._usable if id(one) not in taken]
        alone = [Layer(one, kind) for one, kind in rest if kind is not None]
        worth = [layer for layer in alone if layer.kind == "vocabulary" or _products(layer) >= LEAST_PRODUCTS]
        self.alone = worth if worth or self.together else alone

    def placements(self, layers: Sequence[Layer]) -> dict[int, Placement]:
        """How the parameters of layers are cut."""
        return {id(cut[0]): self._placement_of(*cut) for layer in layers for cut in layer.cuts}

    def _placement_of(self, parameter: torch.Tensor, dim: int, blocks: int) -> Placement:
        edges = tuple(bounds(parameter.shape[dim] // blocks, self.group.world))
        number = self._watched.numbers[id(parameter)]
        return Placement(parameter.shape, self.group, self._refuse, edges, number, dim, blocks)

    def _is_usable(self, module: nn.Module) -> bool:
        """Whether all that a layer's parameters are for is its own call, as PyTorch has it."""
        own = list(module.parameters())
        plain = "forward" not in vars(module) and not module._forward_pre_hooks  # as of `weight_norm`
        return (
            bool(own)
            and plain
            and all(map(can_be_cut, own))
            and not any(id(p) in self._watched.read_outside for p in own)
        )

    def _has_heads(self, module: nn.Module) -> bool:
        if type(module).forward is not nn.MultiheadAttention.forward:
            return False
        assert isinstance(module, nn.MultiheadAttention)
        is_plain = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
        return is_plain and module.num_heads % self.group.world == 0 and "weight" in module.out_proj._parameters

    def _kind_alone(self, module: Any) -> Kind | None:
        """How a layer is divided by itself, where that is worth an exchange."""
        world, weight = self.group.world, module._parameters.get("weight")
        num_elements = sum(p.numel() for p in self._module.parameters())
        if weight is None or weight.numel() < LEAST_SHARE * num_elements or weight.shape[0] < world:
            return None
        if _is_linear(module):
            return "joined"
        # looking up words does nothing but that
        is_plain = type(module).forward is nn.Embedding.forward and module.max_norm is None
        return "vocabulary" if is_plain and not module.sparse and not module.scale_grad_by_freq else None

    def _try(self, scope: nn.Module, layers: list[Any], num: int) -> bool:
        if len(layers) < num or any(len(self._watched.outputs.get(id(one), ())) != 1 for one in layers):
            return False
        *columns, row = layers
        outs = [one.out_features for one in columns]
        blocks = 3 if num == 2 and outs[0] == 3 * row.in_features else 1
        is_called = id(scope) in self._watched.calls
        if not is_called or not _fit(outs, row.in_features, blocks) or min(outs) // blocks < self.group.world:
            return False
        every: list[list[Told]] = [[]]  # that modules may have to be told
        if num == 4 or blocks > 1:  # attention
            widths = {one.out_features // blocks for one in columns}
            every = [told for words in ((), ("dim", "embd", "size")) if (told := self._told(scope, widths, words))]
        found = next((told for told in every if self._holds(scope, columns, row, blocks, told)), None)
        if found is None:
            return False
        made = [Layer(one, "columns", blocks) for one in columns] + [Layer(row, "row")]
        made[0].attributes = found
        self.together += made
        return True

    def _told(self, scope: nn.Module, widths: Collection[int], words: Sequence[str]) -> list[Told]:
        """Numbers of heads, and widths, that modules keep as attributes: what they are on one rank."""
        found, world = [], self.group.world
        for inner in (one for one in scope.modules() if not isinstance(one, nn.Linear)):
            for name, value in vars(inner).items():
                if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value % world or value < world:
                    continue
                is_heads = "head" in name and not any(word in name for word in ("dim", "size"))
                if is_heads or (value in widths and any(word in name for word in words)):
                    found.append((inner, name, int(value) // world))
        return found

    def _holds(self, scope: nn.Module, columns: list[Any], row: Any, blocks: int, told: list[Told]) -> bool:
        """Whether parts of the first layers' features are all that the last one needs, on all ranks."""
        args, kwargs, value = self._watched.calls[id(scope)]
        wanted = self._watched.outputs[id(row)][0]
        layers = [Layer(one, "columns", blocks) for one in columns]
        swaps = {id(cut[0]): stand_in(self._placement_of(*cut).mine(cut[0])) for one in layers for cut in one.cuts}
        mine = self._placement_of(row.weight, 1, 1).mine(part_of(row.weight)).contiguous()
        partial: list[torch.Tensor] = []

        def reached(x: torch.Tensor) -> torch.Tensor:
            partial.append(F.linear(x, mine))
            return wanted

        holds = False
        try:
            others = [(row, "forward", reached), *told]
            with torch.no_grad(), Swaps(scope, swaps).made(), replaced(others):
                again = scope(*args, **kwargs)
            pairs = zip(tensors_of(again), tensors_of(value), strict=True)
            holds = len(partial) == 1 and all(assembly.is_close(*pair) for pair in pairs)
        except Exception:  # noqa: BLE001  a wrong guess may raise anything
            holds = False
        if not self.group.everywhere(holds and partial[0].shape == wanted.shape, "layers that go together"):
            return False
        found = self.group.sum(partial[0].contiguous(), "layers that go together")
        bias = 0 if row.bias is None else part_of(row.bias)
        return self.group.everywhere(assembly.is_close(found + bias, wanted), "layers that go together")


def _is_linear(module: Any) -> bool:
    return type(module).forward is nn.Linear.forward and "weight" in module._parameters


def _fit(outs: Sequence[int], entering: int, blocks: int) -> bool:
    """Whether features of the first layers may be all that the last one gets: three as in attention, two if gated."""
    if len(outs) == 3:
        return outs[0] == entering and outs[1] == outs[2]
    return {width // blocks for width in outs} == {entering}


def _products(layer: Layer) -> float:
    """How many a rank need not compute for each feature that is exchanged."""
    weight = layer.module.weight
    return float(weight.numel() / sum(weight.shape))


def agrees(
    division: Division, plan: TensorPlan, layers: Sequence[Layer], call: Any, wanted: Sequence[torch.Tensor]
) -> bool:  # fmt: skip
    """Whether layers divided so give what a call gave, on all ranks; no parameter moves."""
    cuts, group = plan.placements(layers), plan.group
    parts = {id(p): stand_in(cuts[id(p)].mine(p)) for p in division.module().parameters() if id(p) in cuts}
    engine = Computing(group, layers)
    args, kwargs = call
    same = False
    try:
        with division.trial(), torch.no_grad(), Swaps(division.module(), parts).made(), engine.in_parts():
            found = tensors_of(division.compute(*args, **kwargs))
        same = len(found) == len(wanted) and all(map(assembly.is_close, found, wanted))
    except Lost:
        raise
    except Exception:  # noqa: BLE001  what goes together may have been guessed wrongly
        pass
    return group.everywhere(same, "agreement on a division")
