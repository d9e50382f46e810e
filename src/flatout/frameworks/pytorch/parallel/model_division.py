"""How do all ranks compute one call together, each its share of the model?

Every rank has the whole batch. How the model is divided is found at the first call (a `Planner`); of each kind the
first call, and ever rarer later ones, are computed both ways (`confirmation.py`). In: a call. Out: what one process
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.cuts import Cut
from flatout.frameworks.pytorch.parallel.division import Division
from flatout.frameworks.pytorch.parallel.held import Found, HeldByModel, Passed
from flatout.frameworks.pytorch.parallel.pattern import Check, Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.trees import map_tensors, tensors_of

Planner = Callable[["ModelDivision", tuple[Any, ...], dict[str, Any]], HeldByModel]
"""Finds how a model is divided, by a call of it, and takes its parameters."""


class ModelDivision(Division):
    """Divides the model of a module's calls."""

    planner: Planner | None = None
    """Until the first call."""

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_of((args, kwargs), unique=False)
        self.held.renew()
        if self.planner is not None:
            self.confirmation.begin(inputs, first=True)
            self.held, self.planner = self.planner(self, args, kwargs), None
        kind = self._kind(args, kwargs, inputs)
        shapes = tuple(t.shape for t in inputs)
        pattern, check = self._patterns.get(kind), None
        if pattern is None or self._is_due(pattern, shapes):
            former = pattern
            known = former if former is not None else self._pattern(args, kwargs, inputs)
            pattern, check = self.confirmation.together(args, kwargs, inputs, known, first=former is None)
            if former is not None:
                pattern.sizes, pattern.num_calls = former.sizes, former.num_calls
            pattern.sizes.add(shapes)
            self._patterns[kind] = pattern
        self.num_divided += 1
        call = _TogetherCall(self, pattern, args, kwargs, check)
        differentiable = [t for t in inputs if t.requires_grad]
        return call.rebuilt(_Together.apply(call, *differentiable, *self.held.parameters))

    def _pattern(self, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> Pattern:
        """What is known of a kind of call before it was computed both ways: nothing, where the batch stays whole."""
        del args, kwargs
        return Pattern(Cut((None,) * len(inputs)), None)

    def passed(self, pattern: Pattern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed:
        """Compute a call together with the other ranks."""
        held: Any = self.held
        found: Passed = held.passed(self.compute, args, kwargs, pattern, silent=False)
        return found


class _TogetherCall:
    """One call, between its way forward and its way back."""

    def __init__(self, division: ModelDivision, pattern: Pattern, args: Any, kwargs: Any, check: Check | None) -> None:
        self.division, self._pattern, self._check = division, pattern, check
        self._args, self._kwargs = args, kwargs
        self.outputs: list[torch.Tensor] = []
        self._passed: Any = None
        self._value: Any = None

    def forward(self) -> list[torch.Tensor]:
        """The outputs."""
        with torch.enable_grad():
            self._passed = self.division.passed(self._pattern, self._args, self._kwargs)
        self._args = self._kwargs = None
        self._value, self.outputs = self._passed.value, self._passed.outputs
        self._passed.value = None
        return [tensor.detach() for tensor in self.outputs]

    def rebuilt(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """What the module returned, with the outputs of the node in it."""
        by_id = {id(mine): given for mine, given in zip(self.outputs, outputs, strict=True)}
        value, self._value, self.outputs = self._value, None, []
        return map_tensors(lambda tensor: by_id[id(tensor)], value)

    def backward(self, gradients: Sequence[Any]) -> Found:
        """The gradients of the inputs that want one, and of the parameters."""
        division = self.division
        if torch.is_grad_enabled():
            raise division.refused("gradients of its gradients are taken (`create_graph=True`)")
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        with division.apart():
            if self._check is not None:
                check, self._check = self._check, None
                try:
                    division.confirmation.check_together(check, gradients)
                except NotDivided:
                    division.compare()  # ranks that have diverged are told as that
                    raise
            with division.held.in_place():
                of_parameters, of_inputs = self._passed.backward(gradients, keep=keep)
        return [*of_inputs, *of_parameters]


class _Together(torch.autograd.Function):
    """A call that all ranks compute together as one node of the script's graph."""

    @staticmethod
    def forward(ctx: Any, call: _TogetherCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        outputs = call.forward()
        ctx.call = call
        fixed = [given for given, mine in zip(outputs, call.outputs, strict=True) if not mine.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        """Gradients of the inputs and of the parameters."""
        try:
            return (None, *ctx.call.backward(gradients))
        except NotDivided as problem:
            ctx.call.division.refuse(problem)
