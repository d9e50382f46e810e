"""How do several groups of ranks share a batch, each of which computes with the whole model?

A group computes its part of the batch together; outputs are put together over groups, and gradients summed. In: a call
and how its batch is cut. Out: what one process gives; see `Passed`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.assembly import Rule, Share
from flatout.frameworks.pytorch.parallel.cuts import part_entering
from flatout.frameworks.pytorch.parallel.draws import drawn_apart
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Found, HeldByModel, Passed
from flatout.frameworks.pytorch.parallel.pattern import Pattern
from flatout.frameworks.pytorch.parallel.sharded import Sharded, become, part_of
from flatout.frameworks.pytorch.parallel.summing import summed_in_buckets
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of
from flatout.records.ranks import SUM_OVER_GROUPS

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.model_division import ModelDivision


def passed(division: ModelDivision, args: Any, kwargs: Any, pattern: Pattern, *, silent: bool) -> Passed:
    """Compute a call, each group its part of the batch, or all of one that is too small."""
    held, replicas = cast("HeldByModel", division.held), division.replicas
    inputs = tensors_of((args, kwargs), unique=False)
    num = pattern.cut.num_samples(inputs)
    if replicas is None or pattern.rules is None or num is None or num < replicas.world:
        return held.passed(division.compute, args, kwargs, pattern, silent=silent)
    share = Share.of(inputs, pattern.cut.dims, num, replicas.world)
    low, high = share.edges[replicas.rank], share.edges[replicas.rank + 1]
    args, kwargs, entered = part_entering(args, kwargs, share.dims, low, high)
    draws = functools.partial(drawn_apart, replicas.rank) if pattern.masks and not silent else nullcontext
    with draws():
        mine = held.passed(division.compute, args, kwargs, pattern, silent=silent)
    if len(mine.outputs) != len(pattern.rules):
        raise division.refused(f"it returns {len(mine.outputs)} tensors, and {len(pattern.rules)} before")
    return _PassOfGroups(held, replicas, share, pattern.rules, mine, entered)


class _PassOfGroups:
    """One call; see `Passed`."""

    def __init__(
        self, held: HeldByModel, replicas: Group, share: Share, rules: Sequence[Rule], mine: Passed,
        entered: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._held, self._replicas, self._share, self._mine, self._entered = held, replicas, share, mine, entered
        pairs = zip(rules, mine.outputs, strict=True)
        self._rules = [assembly.fitted(*pair, share, replicas.rank) for pair in pairs]
        whole = assembly.of_all_ranks(mine.outputs, self._rules, share, replicas, "outputs of groups of ranks")
        self.outputs = [
            new.requires_grad_(old.requires_grad) for new, old in zip(whole, mine.outputs, strict=True)
        ]  # fmt: skip
        by_id = {id(old): new for old, new in zip(mine.outputs, self.outputs, strict=True)}
        self.value = map_tensors(lambda tensor: by_id[id(tensor)], mine.value)
        mine.value = None

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """See `Passed`."""
        replicas, share = self._replicas, self._share
        mine = [
            None if gradient is None else assembly.gradient_of(rule, gradient, share, replicas.rank, replicas.world)
            for rule, gradient in zip(self._rules, gradients, strict=True)
        ]
        of_parameters, of_inputs = self._mine.backward(mine, keep=keep)
        whole = assembly.gradients_of_inputs(of_inputs, self._entered, share, replicas)
        return self._summed(of_parameters), whole

    def _summed(self, mine: Found) -> Found:
        """Over groups: what any of them has used has a gradient in all."""
        replicas, parameters = self._replicas, self._held.parameters
        flags = torch.tensor([grad is not None for grad in mine], dtype=torch.uint8)
        used = replicas.gather(flags, "which parameters were used").amax(0).tolist()
        places = [place for place, was in enumerate(used) if was]
        parts = [part_of(parameters[place]) for place in places]
        grads = [
            torch.zeros_like(part) if grad is None else part_of(grad)
            for part, grad in zip(parts, (mine[place] for place in places), strict=True)
        ]
        found: Found = [None] * len(mine)
        for place, grad in zip(places, summed_in_buckets(grads, replicas, SUM_OVER_GROUPS), strict=True):
            parameter = parameters[place]
            found[place] = become(grad, parameter.portions) if isinstance(parameter, Sharded) else grad
        return found
