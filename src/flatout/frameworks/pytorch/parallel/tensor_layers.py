"""How does a rank compute its features of a layer?

A layer by itself computes a part of its outputs, which are joined (`joined`), or looks up its part of a vocabulary
(`vocabulary`). In a pair the first layers compute some features (`columns`), with which the last one goes on (`row`);
attention computes some heads. In: a module whose parameters are this rank's parts. Out: what its `forward` is then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from flatout.frameworks.pytorch.parallel import tensor_exchanges
from flatout.frameworks.pytorch.parallel.cuts import bounds
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.module_calls import without_fast_path

Kind = Literal["joined", "vocabulary", "columns", "row", "heads"]


@dataclass(slots=True)
class Layer:
    """One module that is divided."""

    module: Any
    kind: Kind
    blocks: int = 1
    """So many equal blocks make up its outputs (queries, keys and values)."""
    attributes: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    """What other modules are told meanwhile: a module, the name of an attribute, its value on a rank."""

    @property
    def cuts(self) -> list[tuple[nn.Parameter, int, int]]:
        """Its parameters that are cut: along which dimension, and of how many blocks that is made."""
        own = self.module._parameters
        if self.kind == "heads":
            found = [(own["in_proj_weight"], 0, 3), (own.get("in_proj_bias"), 0, 3)]
            found.append((self.module.out_proj._parameters["weight"], 1, 1))
        elif self.kind == "row":
            found = [(own["weight"], 1, 1)]
        else:
            found = [(own["weight"], 0, self.blocks), (own.get("bias"), 0, self.blocks)]
        return [one for one in found if one[0] is not None]


@contextmanager
def replaced(given: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Within, attributes of modules have other values, for example their `forward`."""
    with ExitStack() as stack:
        for module, name, value in given:
            own = vars(module)
            if name in own:
                stack.callback(own.__setitem__, name, own[name])
            else:
                stack.callback(own.__delitem__, name)
            own[name] = value
        yield


class Computing:
    """Computes layers that are divided by features."""

    def __init__(self, group: Group, layers: Sequence[Layer]) -> None:
        self._group = group
        self.draws: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered where masks are drawn for some features."""
        self._drawing: AbstractContextManager[None] | None = None
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        make = {
            "joined": self._joined, "vocabulary": self._vocabulary, "columns": self._columns, "row": self._row,
            "heads": self._heads,
        }  # fmt: skip
        self._replaced: list[tuple[nn.Module, str, Any]] = [
            (layer.module, "forward", make[layer.kind](layer.module)) for layer in layers
        ]
        self._replaced += [one for layer in layers for one in layer.attributes]

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Within, layers compute this rank's features."""
        try:
            with without_fast_path(), replaced(self._replaced):
                yield
        finally:
            self.end()

    def end(self) -> None:
        """A call is over."""
        self._leave()
        self._entered = None

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        """Layers that get the same input, one after the other, sum its gradients once."""
        if self._entered is None or self._entered[0] is not x:
            self._entered = x, tensor_exchanges.entering(x, self._group)
        return self._entered[1]

    def _leave(self) -> None:
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            drawing.__exit__(None, None, None)

    def _joined(self, module: Any) -> Callable[..., Any]:
        edges = bounds(module.out_features, self._group.world)

        def joined(x: torch.Tensor) -> torch.Tensor:
            part = F.linear(self._enter(x), module.weight, module.bias)
            return tensor_exchanges.joined(part, self._group, edges, x.dim() - 1)

        return joined

    def _vocabulary(self, module: Any) -> Callable[..., Any]:
        group = self._group
        edges = bounds(module.num_embeddings, group.world)
        low, high = edges[group.rank], edges[group.rank + 1]
        padding = module.padding_idx
        own_padding = padding - low if padding is not None and low <= padding < high else None

        def vocabulary(x: torch.Tensor) -> torch.Tensor:
            is_mine = (x >= low) & (x < high)
            part = F.embedding(torch.where(is_mine, x - low, 0), module.weight, own_padding)
            return tensor_exchanges.summed(part * is_mine.unsqueeze(-1), group)

        return vocabulary

    def _columns(self, module: Any) -> Callable[..., Any]:
        def columns(x: torch.Tensor) -> torch.Tensor:
            part = F.linear(self._enter(x), module.weight, module.bias)
            if self._drawing is None:
                self._drawing = self.draws()
                self._drawing.__enter__()
            return part

        return columns

    def _row(self, module: Any) -> Callable[..., Any]:
        def row(x: torch.Tensor) -> torch.Tensor:
            self._leave()
            found = tensor_exchanges.summed(F.linear(x, module.weight), self._group)
            return found if module.bias is None else found + module.bias

        return row

    def _heads(self, module: Any) -> Callable[..., Any]:
        def heads(  # noqa: PLR0913  as PyTorch's
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_padding_mask: Any = None,
            need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
            given: tuple[torch.Tensor, ...] = (query, key, value)
            if query.dim() != 3:
                raise ValueError("attention of a sequence without a batch is not divided")
            is_of_one = key is query is value
            if not module.batch_first:
                given = (query.transpose(0, 1),) * 3 if is_of_one else tuple(one.transpose(0, 1) for one in given)
            num = module.num_heads // self._group.world
            q, k, v = _projected(module, given, num, self._enter)
            mask = _mask(key_padding_mask, attn_mask, q, k, self._group.rank)
            rate = module.dropout if module.training else 0.0
            with self.draws():
                if need_weights:
                    weights = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1)
                    weights = F.dropout((weights if mask is None else weights + mask).softmax(-1), rate)
                    mixed = weights @ v
                else:
                    causal = is_causal and mask is None
                    mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, causal)
            out = module.out_proj
            part = F.linear(mixed.transpose(1, 2).flatten(2), out.weight)
            found = tensor_exchanges.summed(part if module.batch_first else part.transpose(0, 1), self._group)
            found = found if out.bias is None else found + out.bias
            if not need_weights:
                return found, None
            every = tensor_exchanges.joined(weights, self._group, bounds(module.num_heads, self._group.world), 1)
            return found, every.mean(1) if average_attn_weights else every

        return heads


def _projected(
    module: Any, given: Sequence[torch.Tensor], num: int, enter: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Queries, keys and values of this rank's heads: (batch, heads, length, width)."""
    query, key, value = given
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if query is key is value:
        found = F.linear(enter(query), weight, bias).chunk(3, -1)
    else:
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        found = tuple(map(F.linear, map(enter, given), weight.chunk(3), biases))
    return [one.unflatten(-1, (num, -1)).transpose(1, 2) for one in found]


def _mask(padding: Any, attention: Any, q: torch.Tensor, k: torch.Tensor, rank: int) -> torch.Tensor | None:
    """What is added before the softmax, for this rank's heads: (batch, heads, queries, keys)."""
    masks = []
    for mask in (attention, padding):
        if mask is None:
            continue
        is_flags = mask.dtype == torch.bool
        added = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf) if is_flags else mask.to(q.dtype)
        if mask is padding:
            added = added.view(-1, 1, 1, k.shape[2])
        elif added.dim() == 3:  # one for each head of each sample
            added = added.unflatten(0, (q.shape[0], -1)).narrow(1, rank * q.shape[1], q.shape[1])
        masks.append(added)
    return sum(masks[1:], masks[0]) if masks else None
