"""How are the outputs of ranks put together to those of the whole batch?

What a call returns tells by itself: the dimension that shrank counts samples, alone or folded into another one; what
has the same shape is the same everywhere, or a mean or sum over samples. A rule is taken when what it gives is what
the whole batch gave. In: outputs of the whole batch and of a rank's part. Out: one rule for each output; a rank's
outputs put together with the others', and the part of a gradient that is a rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flatout.frameworks.pytorch.parallel.cuts import Tensors, bounds
from flatout.frameworks.pytorch.parallel.group import Group, lengthened, packed, padded, unpacked

Kind = Literal["joined", "folded", "same", "mean", "sum"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""How far an output that is put together may be from the whole one, relative to the whole one's norm. Rounding of a
deep model is some 1e-6 in float32; a wrong rule is wrong by 0.01 to 1."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one output is put together.

    `joined` along the dimension that counts samples; `folded`: it holds so many blocks of all samples; `same` on every
    rank; `mean` over samples, each rank's weighted by its number; `sum` over ranks.
    """

    kind: Kind
    dim: int = 0
    blocks: int = 1
    weigh: int = -1
    """For `mean`: the input whose elements that are not ignored are counted; -1: samples are."""
    skip: int = 0
    """Elements at the start of each row of that input that do not count."""


IGNORED = -100
"""Targets that PyTorch's losses leave out. Source: `ignore_index` of `torch.nn.CrossEntropyLoss`."""


@dataclass(slots=True)
class Share:
    """What each rank has of the `num` samples of a batch: where theirs begin, and the whole inputs, by their `dims`."""

    num: int
    edges: list[int]
    inputs: Tensors
    dims: Sequence[int | None]

    @classmethod
    def of(cls, inputs: Tensors, dims: Sequence[int | None], num: int, world: int) -> Share:
        """The shares of `world` ranks."""
        return cls(num, bounds(num, world), inputs, dims)

    def size(self, rank: int) -> int:
        """Samples of a rank."""
        return self.edges[rank + 1] - self.edges[rank]

    def weight(self, rule: Rule, rank: int) -> float:
        """What a rank's mean counts in the whole one."""
        if rule.weigh < 0:
            return self.size(rank) / self.num
        counted, dim = self.inputs[rule.weigh], self.dims[rule.weigh]
        assert dim is not None
        counts = counted.narrow(1, rule.skip, counted.shape[1] - rule.skip) if rule.skip else counted
        mine = counts.narrow(dim, self.edges[rank], self.size(rank))
        return float((mine != IGNORED).sum()) / max(float((counts != IGNORED).sum()), 1.0)


def candidates(whole: torch.Tensor, mine: torch.Tensor, share: Share, rank: int) -> list[Rule]:
    """Rules that fit the shapes, the likeliest first."""
    if whole.shape == mine.shape:
        # What is the same everywhere is its own mean, too; a rule of its own is for what has no mean.
        places = enumerate(zip(share.inputs, share.dims, strict=True))
        ignored = [(place, one.dim()) for place, (one, dim) in places if dim == 0 and has_ignored(one)]
        # a language model shifts its targets by one
        weighed = [Rule("mean", weigh=place, skip=skip) for place, dims in ignored for skip in range(min(dims, 2))]
        means = [*weighed, Rule("mean")] if whole.is_floating_point() else [Rule("same")]
        return [*means, Rule("sum")]
    if whole.dim() != mine.dim():
        return []
    shrunk = [dim for dim in range(whole.dim()) if whole.shape[dim] != mine.shape[dim]]
    if len(shrunk) != 1:
        return []
    dim, num = shrunk[0], share.num
    blocks, rest = divmod(whole.shape[dim], num)
    if rest or mine.shape[dim] != blocks * share.size(rank):
        return []
    return [Rule("joined", dim, blocks)] + ([Rule("folded", dim, blocks)] if blocks > 1 else [])


def has_ignored(tensor: torch.Tensor) -> bool:
    """Whether classes are among the values that losses leave out."""
    return not tensor.is_floating_point() and tensor.dim() > 0 and bool((tensor == IGNORED).any())


def put_together(rule: Rule, rows: Tensors, share: Share) -> torch.Tensor:
    """The whole output from those of all ranks, in their order."""
    if rule.kind == "joined":
        return torch.cat(list(rows), rule.dim)
    if rule.kind == "folded":
        parts = [row.unflatten(rule.dim, (rule.blocks, share.size(rank))) for rank, row in enumerate(rows)]
        return torch.cat(parts, rule.dim + 1).flatten(rule.dim, rule.dim + 1)
    weights = [share.weight(rule, rank) if rule.kind == "mean" else 1.0 for rank in range(len(rows))]
    # a mean of nothing is no number
    counted = [row * weight for row, weight in zip(rows, weights, strict=True) if weight]
    return torch.stack(counted).sum(0).to(rows[0].dtype) if counted else rows[0]


def gradient_of(rule: Rule, whole: torch.Tensor, share: Share, rank: int, world: int) -> torch.Tensor | None:
    """What a rank's own output has of the gradient of the whole one; None where it counts for nothing."""
    low, size = share.edges[rank], share.size(rank)
    if rule.kind == "joined":
        return whole.narrow(rule.dim, low * rule.blocks, size * rule.blocks)
    if rule.kind == "folded":
        return whole.unflatten(rule.dim, (rule.blocks, share.num)).narrow(rule.dim + 1, low, size).flatten(
            rule.dim, rule.dim + 1
        )  # fmt: skip
    if rule.kind == "same":
        return whole / world
    if rule.kind == "sum":
        return whole
    weight = share.weight(rule, rank)
    return whole * weight if weight else None


def fitted(rule: Rule, mine: torch.Tensor, share: Share, rank: int) -> Rule:
    """The rule for an output of this size: how often samples occur in a dimension may change from call to call."""
    if rule.kind not in ("joined", "folded"):
        return rule
    return replace(rule, blocks=mine.shape[rule.dim] // share.size(rank))


def are_alike(rule: Rule, other: Rule) -> bool:
    """Whether two calls are put together in one way; where samples occur once, joined and folded are the same."""
    once = rule.blocks == 1 or other.blocks == 1
    kinds = {rule.kind, other.kind}
    same = len(kinds) == 1 or (once and kinds == {"joined", "folded"})
    return same and (rule.dim, rule.weigh, rule.skip) == (other.dim, other.weigh, other.skip)


def laid_out_as(whole: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """The whole output with its dimensions in memory in the order of those of a part."""
    if mine.is_contiguous() or mine.dim() != whole.dim():
        return whole
    order = sorted(range(mine.dim()), key=lambda dim: (-mine.stride()[dim], dim))
    back = sorted(range(mine.dim()), key=lambda place: order[place])
    return whole.permute(order).contiguous().permute(back)


def shape_at(rule: Rule, mine: torch.Tensor, share: Share, rank: int) -> tuple[int, ...]:
    """The shape of another rank's output."""
    shape = list(mine.shape)
    if rule.kind in ("joined", "folded"):
        shape[rule.dim] = rule.blocks * share.size(rank)
    return tuple(shape)


def is_close(found: torch.Tensor, wanted: torch.Tensor, *, rounded: float = 0.0) -> bool:
    """Whether one is the other but for rounding; numbers that are no floats must be equal.

    `rounded`: the norm of what was rounded, where more than what came of it: a mean of large numbers may be nought.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not (found.is_floating_point() or found.is_complex()):
        return bool(torch.equal(found, wanted))
    if not bool((torch.isfinite(found) == torch.isfinite(wanted)).all()):
        return False
    exact = found.nan_to_num().double(), wanted.nan_to_num().double()
    distance, norm = (exact[0] - exact[1]).norm(), exact[1].norm()
    return bool(distance <= tolerance(found.dtype) * (norm + rounded) + 1e-30)


def tolerance(dtype: torch.dtype) -> float:
    """See `TOLERANCES`."""
    return TOLERANCES.get(dtype, 1e-4)


def of_all_ranks(mine: Tensors, rules: Sequence[Rule], share: Share, group: Group, name: str) -> list[torch.Tensor]:
    """This rank's outputs put together with those of the others, by rules that are fitted to this call."""
    moved = [(place, rule, mine[place]) for place, rule in enumerate(rules) if rule.kind != "same"]
    whole = [tensor.detach() for tensor in mine]
    if moved:
        shapes = [[shape_at(rule, own, share, rank) for _, rule, own in moved] for rank in range(group.world)]
        rows = exchanged([own for *_, own in moved], shapes, group, name)
        for (place, rule, own), *parts in zip(moved, *rows, strict=True):
            whole[place] = laid_out_as(put_together(rule, parts, share), own)
    return whole


def gradients_of_inputs(
    mine: Sequence[torch.Tensor | None], entered: Tensors, share: Share, group: Group
) -> list[torch.Tensor | None]:
    """Gradients of the inputs that have `entered`, for the whole batch: each rank has those of its own samples."""
    found: list[torch.Tensor | None] = []
    dims = [dim for tensor, dim in zip(share.inputs, share.dims, strict=True) if tensor.requires_grad]
    for grad, tensor, dim in zip(mine, entered, dims, strict=True):
        own = torch.zeros_like(tensor) if grad is None else grad
        if dim is None:
            found.append(group.sum(own.clone(), "gradient of an input"))
        else:
            found.append(group.joined(own, share.edges, dim, "gradient of an input"))
    return found


def exchanged(
    mine: Tensors, shapes: Sequence[Sequence[tuple[int, ...]]], group: Group, name: str
) -> list[list[torch.Tensor]]:
    """Every rank's outputs, each rank's in order, by one collective; `shapes`: for each rank those of its outputs."""
    kinds = [[(shape, t.dtype) for shape, t in zip(row, mine, strict=True)] for row in shapes]
    longest = max(sum(padded(math.prod(shape) * dtype.itemsize) for shape, dtype in row) for row in kinds)
    sent = lengthened(packed(mine, mine[0].device), longest, 0)
    return [unpacked(row, row_kinds) for row, row_kinds in zip(group.gather(sent, name), kinds, strict=True)]
