"""Which calls of a model does each rank make, and which parameters does it need for them?

A stage begins with a call of a module and ends where the next one's begins. Ranks run the model's own
`forward`: what was computed before a stage is a placeholder there (`pipeline_stage.py`), so whatever a stage needs of
it must be given to its first call. Whether that is so is tried on the first call's values. In: a call that was watched.
Out: where stages begin, what each rank does at each call, and how parameters are dealt out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.module_calls import Made, Timeline
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded import Portions

MOST_TRIES = 24
"""Calls that are tried for the beginning of one stage, those that balance best first."""

Action = Literal["skip", "enter", "make", "give", "leave"]
"""At a call: return placeholders; receive its inputs and make it; make it; make it with what was received in the place
of placeholders; send its inputs."""


@dataclass(slots=True)
class StagePlan:
    """What one rank does.

    Attributes:
        begin: The call with which it begins; None where it is the model's own.
        end: The call with which the next stage begins; None where there is none.
        actions: For each module, by identity, what is done at its calls, in their order.
        modules: Those modules.
    """

    begin: int | None
    end: int | None
    actions: dict[int, list[Action]] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline, begin: int | None, end: int | None) -> StagePlan:
        """What is done between two calls."""
        plan = cls(begin, end)
        passed = set() if begin is None else set(map(id, timeline.tensors_at(begin)))
        for call in timeline.calls[: len(timeline.calls) if end is None else end + 1]:
            if begin is not None and any(timeline.calls[outer].end <= begin for outer in call.outer):
                continue  # within a call that is not made
            plan.actions.setdefault(id(call.module), []).append(plan._at(timeline, call, passed))
            plan.modules[id(call.module)] = call.module
        return plan

    def _at(self, timeline: Timeline, call: Made, passed: set[int]) -> Action:
        if call.begin == self.end:
            return "leave"
        if self.begin is None:
            return "make"
        if call.end <= self.begin:
            return "skip"
        if call.begin == self.begin:
            return "enter"
        later = call.begin > self.begin
        return "give" if later and passed.intersection(map(id, timeline.tensors_at(call.begin))) else "make"

    def needs(self, timeline: Timeline, time: int, outer: Sequence[int]) -> bool:
        """Whether this rank computes what was computed then, within those calls."""
        if self.end is not None and time > self.end:
            return False
        if self.begin is None or time > self.begin:
            return True
        return all(timeline.calls[one].end > self.begin for one in outer)


class PipelinePlan:
    """Finds where stages begin.

    Args:
        timeline: Of a call.
        group: All ranks: as many stages.
        holds: Whether stages may be parted at a call; all ranks are asked alike.
    """

    def __init__(self, timeline: Timeline, group: Group, holds: Callable[[int], bool]) -> None:
        self._timeline, self._group, self._holds = timeline, group, holds
        self._verdicts: dict[int, bool] = {}
        self.begins: list[int] = []
        """The calls with which the stages but the first begin."""

    def find(self) -> bool:
        """Whether there are as many stages as ranks."""
        timeline, world = self._timeline, self._group.world
        whole = sum(timeline.costs)
        before = [timeline.before(call.begin) for call in timeline.calls]
        possible = [call.begin for call in timeline.calls if _takes_floats(timeline, call) and before[call.begin] > 0]
        for number in range(1, world):
            reached = before[self.begins[-1]] if self.begins else 0.0
            target = reached + (whole - reached) / (world - number + 1)
            later = [one for one in possible if reached < before[one] < whole]
            after = sorted({before[one] for one in later})[
                : -(world - 1 - number) or None
            ]  # some are left for the rest
            later = [one for one in later if before[one] in after]
            # of calls that begin together the outermost comes first, for nothing was computed in between
            best = sorted(later, key=lambda one: (abs(before[one] - target), one))
            found = next((one for one in best[:MOST_TRIES] if self._may_begin(one)), None)
            if found is None:
                return False
            self.begins.append(found)
        return True

    def _may_begin(self, call: int) -> bool:
        if call not in self._verdicts:
            self._verdicts[call] = self._holds(call)
        return self._verdicts[call]

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

    def portions(self, refuse: Callable[[NotDivided], Any]) -> dict[int, Portions]:
        """Parameters that one rank alone computes with are that rank's; the others stay whole."""
        timeline, group = self._timeline, self._group
        stages, found = self.stages(), {}
        for number, parameter in enumerate(timeline.module.parameters()):
            reads = timeline.reads.get(id(parameter), set())
            ranks = {rank for rank, stage in enumerate(stages) if any(stage.needs(timeline, *read) for read in reads)}
            if len(ranks) == 1 and parameter.dim() and _can_move(parameter):
                owner, size = ranks.pop(), parameter.shape[0]
                edges = tuple(0 if rank <= owner else size for rank in range(group.world + 1))
                found[id(parameter)] = Portions(parameter.shape, group, refuse, edges, number)
        return found


def _takes_floats(timeline: Timeline, call: Made) -> bool:
    return any(tensor.is_floating_point() for tensor in timeline.tensors_at(call.begin))


def _can_move(parameter: torch.Tensor) -> bool:
    return bool(parameter.is_floating_point() and parameter.is_contiguous() and parameter.numel())
