"""How does a model come to be divided into stages?

Its first call is watched, a plan is made and tried, parameters move. What was computed before a stage is a placeholder
there (`pipeline_stage.py`), so whatever a stage needs of it must be given to its first call: whether that is so is
tried on the first call's values. In: a division and its first call. Out: each rank's stage with its parameters; or a
refusal, before anything has moved.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.confirmation import nodes_behind
from flatout.frameworks.pytorch.parallel.cuts import Tensors
from flatout.frameworks.pytorch.parallel.division import ModelDivision
from flatout.frameworks.pytorch.parallel.group import Group, Lost
from flatout.frameworks.pytorch.parallel.module_calls import Timeline
from flatout.frameworks.pytorch.parallel.pipeline_parts import (
    INPUTS_TRAINED,
    MICRO_BATCHES_PER_RANK,
    PipelineParts,
)
from flatout.frameworks.pytorch.parallel.pipeline_stage import Computation, Placeholders, Stage, StagePlan, shapes_of
from flatout.frameworks.pytorch.parallel.protocol import Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import REPLICATE, Placement, can_be_cut
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import tensors_of

MOST_TRIES = 24
"""Calls that are tried for the beginning of one stage, those that balance best first."""


def planned(
    division: ModelDivision, args: Any, kwargs: Any, pattern: Pattern, refuse: Callable[[NotDivided], Any]
) -> PipelineParts:
    """Find the stages of a model, and take its parameters; or `NotDivided`."""
    stage, placements = _found(division, args, kwargs, pattern, refuse)  # the graph of the watched call is gone then
    return PipelineParts(division.module(), division.sharing, stage, placements)


def _found(
    division: ModelDivision, args: Any, kwargs: Any, pattern: Pattern, refuse: Callable[[NotDivided], Any]
) -> tuple[Stage, dict[int, Placement]]:
    """This rank's stage, and whose parameters are whose."""
    module, group = division.module(), division.sharing
    if any(isinstance(part, _BatchNorm) and part.training for part in module.modules()):
        raise _refused(division, "its batch normalisation would see micro-batches, whose statistics are others")
    timeline, placeholders = Timeline(module), Placeholders(shapes_of(module))
    wanted = _watched(division, timeline, args, kwargs)

    def holds(begin: int) -> bool:
        """Whether a call is given all that the rest of the model needs, on every rank."""
        stage = Stage(StagePlan.of(timeline, begin, None), placeholders)
        agrees = _agrees(division, stage, [one.detach() for one in timeline.tensors_at(begin)], (args, kwargs), wanted)
        return division.group.everywhere(agrees, "stages of a pipeline")

    plan = PipelinePlan(timeline, group, holds)
    if not plan.find():
        cause = "what is computed early in it is needed everywhere: no call is given all that comes before it"
        if len(timeline.calls) < group.world:
            cause = f"it calls {len(timeline.calls)} modules, which do not make {group.world} stages"
        raise _refused(division, cause)
    num_replicas = 1 if division.replicas is None else division.replicas.world
    division.confirmation.remark(_told(plan, module, pattern, (args, kwargs), num_replicas))
    return Stage(plan.stages()[group.rank], placeholders), plan.placements(refuse)


def _watched(division: ModelDivision, timeline: Timeline, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The outputs of a call that is watched; refused is what each stage would do anew."""
    before, printed = RandomStates(), io.StringIO()
    with division.trial(), contextlib.redirect_stdout(printed):
        value = timeline.watch(division.compute, args, kwargs)
        draws = not before.equals(RandomStates())
    if printed.getvalue():
        raise _refused(division, "it prints within its call, which each stage would do for each micro-batch")
    if any("CheckpointFunction" in node.name() for node in nodes_behind(tensors_of(value))):
        raise _refused(division, "it checkpoints with `use_reentrant`, which gradients of a stage do not pass")
    if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
        raise _refused(division, INPUTS_TRAINED)
    if draws:
        raise _refused(division, "it draws random numbers beside dropout: each of its stages would draw others")
    return [tensor.detach() for tensor in tensors_of(value)]


class PipelinePlan:
    """Finds where stages begin, as many as there are ranks; `holds`: whether they may be parted at a call."""

    def __init__(self, timeline: Timeline, group: Group, holds: Callable[[int], bool]) -> None:
        self._timeline, self._group, self._holds = timeline, group, holds
        self.begins: list[int] = []
        """The calls with which the stages but the first begin."""

    def find(self) -> bool:
        """Whether there are as many stages as ranks."""
        timeline, world = self._timeline, self._group.world
        whole = sum(timeline.costs)
        before = [timeline.before(call.begin) for call in timeline.calls]
        takes_floats = [any(t.is_floating_point() for t in timeline.tensors_at(one.begin)) for one in timeline.calls]
        possible = [call.begin for call in timeline.calls if takes_floats[call.begin] and before[call.begin] > 0]
        for number in range(1, world):
            reached = before[self.begins[-1]] if self.begins else 0.0
            target = reached + (whole - reached) / (world - number + 1)
            later = [one for one in possible if reached < before[one] < whole]
            # some are left for the rest
            after = sorted({before[one] for one in later})[: -(world - 1 - number) or None]
            later = [one for one in later if before[one] in after]
            # of calls that begin together the outermost comes first, for nothing was computed in between
            best = sorted(later, key=lambda one: (abs(before[one] - target), one))
            found = next((one for one in best[:MOST_TRIES] if self._holds(one)), None)
            if found is None:
                return False
            self.begins.append(found)
        return True

    def stages(self) -> list[StagePlan]:
        """One for each rank."""
        edges: list[int | None] = [None, *self.begins, None]
        return [StagePlan.of(self._timeline, *edges[rank : rank + 2]) for rank in range(self._group.world)]

    def module_at(self, call: int) -> nn.Module:
        """Which module was called then."""
        return self._timeline.calls[call].module

    def shares(self) -> list[float]:
        """What of the whole cost each stage has."""
        whole = sum(self._timeline.costs) or 1.0
        edges = [0.0, *(self._timeline.before(one) for one in self.begins), whole]
        return [(high - low) / whole for low, high in itertools.pairwise(edges)]

    def placements(self, refuse: Callable[[NotDivided], Any]) -> dict[int, Placement]:
        """Parameters that one rank alone computes with are that rank's; the others stay whole."""
        timeline, group = self._timeline, self._group
        stages, found = self.stages(), {}
        for number, parameter in enumerate(timeline.module.parameters()):
            reads = timeline.reads.get(id(parameter), set())
            ranks = {rank for rank, stage in enumerate(stages) if any(stage.needs(timeline, *read) for read in reads)}
            if len(ranks) == 1 and can_be_cut(parameter):
                owner, size = ranks.pop(), parameter.shape[0]
                edges = tuple(0 if rank <= owner else size for rank in range(group.world + 1))
                found[id(parameter)] = Placement(parameter.shape, group, refuse, edges, number)
        return found


def _refused(division: ModelDivision, cause: str) -> NotDivided:
    return NotDivided(
        f"`{division.name}` cannot be divided into stages",
        cause=cause,
        hint=f"`--mode shard` divides the memory of any model; or {REPLICATE}",
    )


def _agrees(division: ModelDivision, stage: Stage, given: Tensors, call: Any, wanted: Tensors) -> bool:
    """Whether what a call is given is all that the rest of the model needs."""
    args, kwargs = call

    def receive(placeholders: Tensors) -> Tensors:
        """Nothing where shapes were not foreseen: what lies between two calls may depend on them."""
        return given if [one.shape for one in placeholders] == [one.shape for one in given] else ()

    computation = Computation(receive)
    try:
        with division.trial(), torch.no_grad(), stage.in_place():
            stage.compute(computation, division.compute, args, kwargs)
        found = tensors_of(computation.value)
        return len(found) == len(wanted) and all(map(assembly.is_close, found, wanted))
    except Lost:
        raise
    except Exception:  # noqa: BLE001  zeros in the place of numbers may lead anywhere
        return False


def _told(plan: PipelinePlan, module: nn.Module, pattern: Pattern, call: Any, num_replicas: int) -> str:
    """Where stages begin, and what each has of the work."""
    names = {id(part): name for name, part in module.named_modules()}
    begins = [f"`{names.get(id(plan.module_at(one)), '?')}`" for one in plan.begins]
    num = pattern.cut.num_samples(tensors_of(call, unique=False)) if pattern.rules is not None else None
    num_stages = len(begins) + 1
    num_micro = max(min(MICRO_BATCHES_PER_RANK * num_stages, (num or 1) // num_replicas), 1)
    return (
        f"{num_stages} stages ({', '.join(f'{100 * share:.0f}' for share in plan.shares())} % of the work), the next "
        f"ones beginning at {', '.join(begins)}; {num_micro} micro-batch{'es' * (num_micro != 1)}"
    )
