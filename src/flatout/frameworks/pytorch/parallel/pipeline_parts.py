"""How do ranks compute one batch together, each some of the model's calls?

The batch goes through the stages in micro-batches, first all forwards, later all backwards, for it is the script that
computes the loss in between. In: a rank's stage. Out: the parameters of a module in parts, and calls of it.

Source: Huang et al., "GPipe", arXiv 1811.06965, section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.assembly import Rule, Share
from flatout.frameworks.pytorch.parallel.cuts import Tensors, part_entering
from flatout.frameworks.pytorch.parallel.group import Group, Lost
from flatout.frameworks.pytorch.parallel.partial_parameters import Parts
from flatout.frameworks.pytorch.parallel.pipeline_exchanges import Line, Parcel
from flatout.frameworks.pytorch.parallel.pipeline_stage import AnotherWay, Computation, Stage
from flatout.frameworks.pytorch.parallel.protocol import ForwardResult, Found, Pattern
from flatout.frameworks.pytorch.parallel.random_numbers import drawn_apart
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import REPLICATE, Placement
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

MICRO_BATCHES_PER_RANK = 4
"""Fewer leave more of the time empty, more make small products. Source: GPipe, section 2.3: the empty time is
negligible from four on."""

INPUTS_TRAINED = "gradients of its inputs are wanted, and stages give those of parameters alone"


class PipelineParts(Parts):
    """The parameters of one module, on each rank those of its stage; they are dealt out now."""

    def __init__(self, module: nn.Module, group: Group, stage: Stage, placements: dict[int, Placement]) -> None:
        super().__init__(module, group, placements, are_alike=False)
        self.group, self.stage = group, stage
        self.line = Line(group, next(module.parameters()).device)

    def computing(self) -> AbstractContextManager[None]:
        """See `Parts`."""
        return self.stage.in_place()

    def passed(
        self, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: Pattern, *, silent: bool
    ) -> ForwardResult:
        """See `ParameterHolder`; or `NotDivided`."""
        draws = drawn_apart(self.group.rank) if pattern.masks and not silent else nullcontext()
        made = _Pass(self, pattern, args, kwargs)
        with torch.enable_grad(), draws, self.in_place():
            if made.forward(compute, args, kwargs):
                return made
        raise NotDivided(
            f"a call of `{type(self.module).__name__}` takes another way through its stages",
            cause=made.problem or "another rank does not come to the end of its stage",
            hint=f"`--mode shard` divides the memory of any model; or {REPLICATE}",
        )  # fmt: skip

    def evaluated(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `ParameterHolder`: by every rank, with gathered parameters; it may take another way than training."""
        with self.in_whole():
            return compute(*args, **kwargs)


@dataclass(slots=True)
class _MicroBatch:
    """One micro-batch on this rank: its way through the stage, and what it has received."""

    computation: Computation
    arrived: Parcel | None = None
    outputs: Tensors = ()
    """What was returned or passed on, each tensor once."""
    gradients: Sequence[torch.Tensor | None] = ()
    """Of what was received, each tensor once."""


class _Pass:
    """One call; see `ForwardResult`."""

    def __init__(self, held: PipelineParts, pattern: Pattern, args: Any, kwargs: Any) -> None:
        inputs = tensors_of((args, kwargs), unique=False)
        num = pattern.cut.num_samples(inputs)
        if num is None and any(dim is not None for dim in pattern.cut.dims):
            raise NotDivided("a batch cannot be cut", cause="the inputs of a call do not agree on its samples")
        if any(t.requires_grad for t in inputs):
            raise NotDivided("a model cannot be divided into stages", cause=INPUTS_TRAINED)
        self.value: Any = None
        self.outputs: list[torch.Tensor] = []
        self.problem = ""
        """Why this rank did not come to the end of its stage."""
        group = held.group
        most = MICRO_BATCHES_PER_RANK * group.world if num and pattern.rules is not None else 1
        self._num = max(min(most, num or 1), 1)
        self._share = Share.of(inputs, pattern.cut.dims, num or 1, self._num)
        self._held, self._rules = held, pattern.rules
        self._fitted: list[tuple[Rule, ...]] = []
        self._micro_batches: list[_MicroBatch] = []
        self._is_first, self._is_last = group.rank == 0, group.rank == group.world - 1

    def forward(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Compute; whether all ranks came to the end of their stages."""
        held, values, is_whole = self._held, [], True
        for number in range(self._num):
            new_args, new_kwargs, _ = part_entering(args, kwargs, self._share, number)
            micro = _MicroBatch(Computation(lambda placeholders: ()))
            micro.computation.receive = functools.partial(self._receive, micro, number)
            is_whole = self._computed(micro, number, compute, new_args, new_kwargs) and is_whole
            self._micro_batches.append(micro)
            values.append(micro.computation.value)
            micro.computation.value = None
        held.line.settle("activations that are passed on")
        parcel = None  # the last rank tells all what the model returns
        if self._is_last:
            parcel = Parcel(self._put_together(values)) if is_whole else Parcel(None, is_whole=False)
        parcel = held.line.told(parcel, held.group.world - 1, "outputs of the last stage")
        self.value, self.outputs = parcel.value, tensors_of(parcel.value)
        return parcel.is_whole

    def _computed(self, micro: _MicroBatch, number: int, compute: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        held, computation = self._held, micro.computation
        is_whole = True
        try:
            held.stage.compute(computation, compute, args, kwargs)
        except (Lost, NotDivided):
            raise
        except Exception as problem:  # noqa: BLE001  the script's own errors are raised where all is computed at once
            is_whole, self.problem = False, f"{type(problem).__name__}: {problem}"
        if not self._is_first and micro.arrived is None:
            micro.arrived = self._arrived(number)
        is_whole = is_whole and (micro.arrived is None or micro.arrived.is_whole)
        micro.outputs = tensors_of(computation.value if self._is_last else computation.given)
        if not self._is_last:
            parcel = Parcel(computation.given) if is_whole else Parcel(None, is_whole=False)
            held.line.send(parcel, held.group.rank + 1)
        return is_whole

    def _arrived(self, number: int) -> Parcel:
        name = f"activations of the stage before, {number + 1} of {self._num}"
        return self._held.line.receive(self._held.group.rank - 1, name)

    def _receive(self, micro: _MicroBatch, number: int, _: list[torch.Tensor]) -> Tensors:
        """What the stage before has computed, as what this one's graph begins with."""
        micro.arrived = parcel = self._arrived(number)
        if not parcel.is_whole:
            raise AnotherWay("the stage before has not come to its end")
        tensors = tensors_of(parcel.value)
        begun = _Received.apply(micro, tensors, torch.empty(0, requires_grad=True))
        by_id = {id(one): mine for one, mine in zip(tensors, begun, strict=True)}
        return [by_id[id(one)] for one in parcel.value]

    def _put_together(self, values: list[Any]) -> Any:
        """What the model returns for the whole batch."""
        rows = [tensors_of(value) for value in values]
        rules = self._rules or tuple(Rule("same") for _ in rows[0])
        if any(len(row) != len(rules) for row in rows):
            raise NotDivided("a model cannot be divided into stages", cause="it returns another number of tensors")
        share = self._share
        self._fitted = [
            tuple(assembly.fitted(rule, one, share, number) for rule, one in zip(rules, row, strict=True))
            for number, row in enumerate(rows)
        ]
        whole = {}
        for place, one in enumerate(rows[0]):
            parts, rule = [row[place].detach() for row in rows], self._fitted[0][place]
            put = parts[0] if rule.kind == "same" else assembly.put_together(rule, parts, share)
            whole[id(one)] = assembly.laid_out_as(put, one).detach().requires_grad_(one.requires_grad)
        return map_tensors(lambda tensor: whole[id(tensor)], values[0])

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """See `ForwardResult`."""
        held = self._held
        held.forget_gradients()
        for number, micro in enumerate(self._micro_batches):
            self._gone_back(micro, number, gradients, keep=keep)
        held.line.settle("gradients that are passed back")
        return held.collected(), []

    def _gone_back(self, micro: _MicroBatch, number: int, gradients: Sequence[Any], *, keep: bool) -> None:
        held, rank = self._held, self._held.group.rank
        mine: Sequence[Any] = [None] * len(micro.outputs)
        if self._is_last:
            mine = [
                None if gradient is None else assembly.gradient_of(rule, gradient, self._share, number, self._num)
                for rule, gradient in zip(self._fitted[number], gradients, strict=True)
            ]
        elif any(tensor.requires_grad for tensor in micro.outputs):
            mine = held.line.receive(rank + 1, f"gradients of the stage after, {number + 1} of {self._num}").value
        pairs = [(o, g) for o, g in zip(micro.outputs, mine, strict=True) if g is not None and o.requires_grad]
        arrived = tensors_of(micro.arrived.value) if micro.arrived is not None else []
        micro.gradients = [None] * len(arrived)
        if pairs:
            with held.stage.again(micro.computation):
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], retain_graph=keep)
        if any(one.requires_grad for one in arrived):
            held.line.send(Parcel(micro.gradients), rank - 1)


class _Received(torch.autograd.Function):
    """What a stage begins with: its gradients are sent back."""

    @staticmethod
    def forward(ctx: Any, micro: _MicroBatch, tensors: Tensors, _: torch.Tensor) -> Any:
        """As it came."""
        ctx.micro = micro
        begun = tuple(one.data for one in tensors)
        ctx.mark_non_differentiable(*(new for new, one in zip(begun, tensors, strict=True) if not one.requires_grad))
        ctx.set_materialize_grads(False)
        return begun

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        """Kept, until the micro-batch is through."""
        ctx.micro.gradients = list(gradients)
        return None, None, None
