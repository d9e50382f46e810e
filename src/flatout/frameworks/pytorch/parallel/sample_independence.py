"""Does a sample give the same in other company? A cheap look at whether a batch may still be divided.

Each rank computes two samples of its part and one of the next rank's; outputs of that one are held against those that
the next rank has, which computes it beside others. Without masks of dropout, and batch normalisation takes what it
remembers. In: a call. Out: whether the samples agree, the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.batch import with_running_statistics
from flatout.frameworks.pytorch.parallel.cuts import bounds, entering
from flatout.frameworks.pytorch.parallel.group import Lost
from flatout.frameworks.pytorch.parallel.protocol import Dividing, Pattern
from flatout.frameworks.pytorch.seams.trees import tensors_of

FIRST = 32
"""So many calls of a kind are all looked at: what a model does every so many calls shows in them."""

SELDOM = 16
"""Later one call in so many, in no rhythm that a model may have."""

NUM = 3
MOST_ELEMENTS = 4096
"""So many elements of an output of a sample are compared, spread over it."""

Outputs = list[torch.Tensor]


def is_due(num: int) -> bool:
    """Whether a kind's call of this number is looked at, the same on all ranks.

    >>> [num for num in range(30, 130) if is_due(num)]
    [30, 31, 32, 34, 47, 68, 81, 89, 102, 123]
    """
    return num <= FIRST or num * 2654435761 % 2**32 < 2**32 // SELDOM


def agrees(division: Dividing, pattern: Pattern, args: Any, kwargs: Any) -> bool:
    """Whether samples give the same in other company, as far as that can be told.

    After a disagreement the kind of call is sampled no more: what computing it both ways tells counts.
    """
    inputs, group = tensors_of((args, kwargs), unique=False), division.group
    num = pattern.cut.num_samples(inputs) or 0
    is_joined = any(rule.kind == "joined" for rule in pattern.rules or ())
    dynamo = sys.modules.get("torch._dynamo.utils")  # what is compiled would be once more, for so small a batch
    compiles = dynamo is not None and bool(dynamo.counters["frames"])
    if not pattern.is_sampled or pattern.noise or not is_joined or num < 2 * group.world or compiles:
        return True
    edges, turn = bounds(num, group.world), pattern.num_calls % (num // group.world - 1)
    low, beyond = (edges[rank % group.world] + turn for rank in (group.rank, group.rank + 1))
    rows = group.objects(_computed(division, pattern, args, kwargs, [low, low + 1, beyond]), "samples of two ranks")
    pairs = zip(rows, [*rows[1:], rows[0]], strict=True)
    pattern.is_sampled = all(mine and other and all(map(assembly.is_close, mine[1], other[0])) for mine, other in pairs)
    return pattern.is_sampled or None in rows  # a model that raises on a small batch cannot be looked at so


def _computed(
    division: Dividing, pattern: Pattern, args: Any, kwargs: Any, samples: list[int]
) -> tuple[Outputs, Outputs] | None:
    """Outputs of the first and of the last one; None where the model raises."""

    def taken(dim: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda whole: whole if dim is None else whole.index_select(dim, torch.tensor(samples).to(whole.device))

    args, kwargs, _ = entering(args, kwargs, map(taken, pattern.cut.dims))
    try:
        with division.trial(), torch.no_grad(), with_running_statistics(), division.held.in_place():
            outputs = tensors_of(division.compute(*args, **kwargs))
        pairs = [pair for pair in zip(pattern.rules or (), outputs, strict=True) if pair[0].kind == "joined"]
        samples_of = [out.chunk(NUM, rule.dim) for rule, out in pairs]
        flat = [[one[at].flatten() for one in samples_of] for at in (0, NUM - 1)]
        first, last = ([one[:: one.numel() // MOST_ELEMENTS + 1].cpu() for one in each] for each in flat)
    except Lost:
        raise
    except Exception:  # noqa: BLE001  the script's own code, on a batch that it has not asked for
        return None
    return first, last
