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
from flatout.frameworks.pytorch.parallel.cuts import part_entering
from flatout.frameworks.pytorch.parallel.draws import drawn_apart
from flatout.frameworks.pytorch.parallel.group import Group, Lost
from flatout.frameworks.pytorch.parallel.parts import Parts
from flatout.frameworks.pytorch.parallel.pipeline_exchanges import Line, Parcel, formed, with_form
from flatout.frameworks.pytorch.parallel.pipeline_stage import AnotherWay, Computation, Stage
from flatout.frameworks.pytorch.parallel.protocol import Found, Passed, Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded import REPLICATE, Placement
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

MICRO_BATCHES_PER_RANK = 4
"""Fewer leave more of the time empty, more make small products. Source: GPipe, section 2.3: the empty time is
negligible from four on."""


INPUTS_TRAINED = "gradients of its inputs are wanted, and stages give those of parameters alone"


def most_micro_batches(world: int) -> int:
    """Into how many a batch is cut that is large enough."""
    return MICRO_BATCHES_PER_RANK * world


def bubble(shares: Sequence[float], num_micro_batches: int) -> float:
    """The part of the time in which ranks wait for other stages, the mean over ranks.

    Args:
        shares: What each stage has of the work; together 1.
        num_micro_batches: Into how many the batch is cut: the costliest stage computes them without a pause.

    >>> bubble([0.5, 0.5], 1), round(bubble([0.25] * 4, 12), 3), round(bubble([0.1, 0.9], 8), 3)
    (0.5, 0.2, 0.452)
    """
    lasts = (sum(shares) + (num_micro_batches - 1) * max(shares)) / num_micro_batches
    return 1 - sum(shares) / len(shares) / lasts


class PipelineParts(Parts):
    """The parameters of one module, on each rank those of its stage.

    Args:
        module: Its parameters are dealt out now.
        group: All ranks.
        stage: Of this rank.
        placements: Which parameters are a single rank's, by identity.
    """

    def __init__(self, module: nn.Module, group: Group, stage: Stage, placements: dict[int, Placement]) -> None:
        device = next(module.parameters()).device
        every = {id(p) for p in module.parameters()}
        super().__init__(module, group, placements, every, are_alike=False)
        self.group, self.stage = group, stage
        self.line = Line(group, device)
        self._apart = functools.partial(drawn_apart, group.rank)

    def computing(self) -> AbstractContextManager[None]:
        """See `Parts`."""
        return self.stage.in_place()

    def passed(self, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: Pattern, *, silent: bool) -> Passed:
        """See `Held`.

        Raises:
            NotDivided: The call takes another way through the model.
        """
        draws = self._apart if pattern.masks and not silent else nullcontext
        made = _Pass(self, pattern, args, kwargs)
        with torch.enable_grad(), draws(), self.in_place():
            if made.forward(compute, args, kwargs):
                return made
        raise NotDivided(
            f"a call of `{type(self.module).__name__}` takes another way through its stages",
            cause=made.problem or "another rank does not come to the end of its stage",
            hint=f"`--mode shard` divides the memory of any model; or {REPLICATE}",
        )  # fmt: skip

    def evaluated(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `Held`: by every rank, with gathered parameters; it may take another way than training."""
        with self.in_whole():
            return compute(*args, **kwargs)


@dataclass(slots=True)
class _MicroBatch:
    """One micro-batch on this rank.

    Attributes:
        computation: Its way through the stage.
        outputs: What was returned or passed on.
        arrived: What was received.
        gradients: Of what was received.
    """

    computation: Computation
    outputs: Sequence[torch.Tensor] = ()
    arrived: Parcel | None = None
    gradients: Sequence[torch.Tensor | None] = ()

    @property
    def wants(self) -> bool:
        """Whether gradients are wanted of what was received."""
        return self.arrived is not None and any(self.arrived.wanted)


class _Pass:
    """One call; see `Passed`."""

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
        most = most_micro_batches(group.world) if num and pattern.rules is not None else 1
        self._share = Share.of(inputs, pattern.cut.dims, num or 1, max(min(most, num or 1), 1))
        self._held, self._rules = held, pattern.rules
        self._fitted: list[tuple[Rule, ...]] = []
        self._micro_batches: list[_MicroBatch] = []
        self._is_first, self._is_last = group.rank == 0, group.rank == group.world - 1

    @property
    def _num(self) -> int:
        return len(self._share.edges) - 1

    # -- forwards ----------------------------------------------------------------------------------------------------

    def forward(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Compute; whether all ranks came to the end of their stages."""
        share, held = self._share, self._held
        values, is_whole = [], True
        for number in range(self._num):
            new_args, new_kwargs, _ = part_entering(args, kwargs, share, number)
            micro = _MicroBatch(Computation(lambda placeholders: ()))
            micro.computation.receive = functools.partial(self._receive, micro, number)
            is_whole = self._computed(micro, number, compute, new_args, new_kwargs) and is_whole
            self._micro_batches.append(micro)
            values.append(micro.computation.value)
            micro.computation.value = None
        held.line.settle("activations that are passed on")
        return self._told(values, is_whole=is_whole)

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
        micro.outputs = tensors_of(computation.value) if self._is_last else computation.given or ()
        if not self._is_last:
            parcel = Parcel.of(micro.outputs) if is_whole else Parcel((), (), is_whole=False)
            held.line.send(parcel, held.group.rank + 1)
        return is_whole

    def _arrived(self, number: int) -> Parcel:
        return self._held.line.receive(
            self._held.group.rank - 1, f"activations of the stage before, {number + 1} of {self._num}"
        )

    def _receive(self, micro: _MicroBatch, number: int, _: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the stage before has computed, as what this one's graph begins with."""
        micro.arrived = parcel = self._arrived(number)
        if not parcel.is_whole:
            raise AnotherWay("the stage before has not come to its end")
        anchor = torch.empty(0, requires_grad=True)
        found: tuple[torch.Tensor, ...] = _Received.apply(micro, parcel, anchor)
        return found

    def _told(self, values: list[Any], *, is_whole: bool) -> bool:
        """The last rank tells all what the model returns; whether it does."""
        held, last = self._held, self._held.group.world - 1
        name = "outputs of the last stage"
        if self._is_last:
            parcel = Parcel((), (), is_whole=False)
            if is_whole:
                self.value = self._put_together(values)
                parcel = Parcel.of(_packed(self.value))
            held.line.told(parcel, last, name)
        else:
            parcel = held.line.told(None, last, name)
            if parcel.is_whole:
                for tensor, is_wanted in zip(parcel.tensors, parcel.wanted, strict=True):
                    if tensor is not None and is_wanted:
                        tensor.requires_grad_()
                self.value = formed(parcel.tensors)
        self.outputs = tensors_of(self.value)
        return parcel.is_whole

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

    # -- backwards ---------------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """See `Passed`."""
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
            mine = self._of_outputs(number, gradients)
        elif any(tensor.requires_grad for tensor in micro.outputs):
            mine = held.line.receive(rank + 1, f"gradients of the stage after, {number + 1} of {self._num}").tensors
        pairs = [(o, g) for o, g in zip(micro.outputs, mine, strict=True) if g is not None and o.requires_grad]
        micro.gradients = [None] * (len(micro.arrived.tensors) if micro.arrived is not None else 0)
        if pairs:
            with held.stage.again(micro.computation):
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], retain_graph=keep)
        if micro.wants:
            held.line.send(Parcel(micro.gradients, [False] * len(micro.gradients)), rank - 1)

    def _of_outputs(self, number: int, gradients: Sequence[Any]) -> list[Any]:
        return [
            None if gradient is None else assembly.gradient_of(rule, gradient, self._share, number, self._num)
            for rule, gradient in zip(self._fitted[number], gradients, strict=True)
        ]


class _Received(torch.autograd.Function):
    """What a stage begins with: its gradients are sent back."""

    @staticmethod
    def forward(ctx: Any, micro: _MicroBatch, parcel: Parcel, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As it came."""
        ctx.micro = micro
        tensors = tuple(tensor for tensor in parcel.tensors if tensor is not None)
        fixed = [one for one, is_wanted in zip(tensors, parcel.wanted, strict=True) if not is_wanted]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        """Kept, until the micro-batch is through."""
        ctx.micro.gradients = list(gradients)
        return None, None, None


def _packed(value: Any) -> list[torch.Tensor]:
    try:
        return with_form(value)
    except Exception as problem:
        raise NotDivided(
            "a model cannot be divided into stages",
            cause=f"what it returns cannot be told to other ranks: {type(problem).__name__}: {problem}",
        ) from problem
