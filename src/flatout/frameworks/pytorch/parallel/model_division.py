"""How do all ranks compute one call together, each its share of the model?

Every rank has the whole batch. How the model is divided is found at the first call (a `Planner`); of each kind the
first call, and ever rarer later ones, are computed both ways (`confirmation.py`). In: a call. Out: what one process
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel import replicas
from flatout.frameworks.pytorch.parallel.cuts import Cut
from flatout.frameworks.pytorch.parallel.division import Division
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Found, HeldByModel
from flatout.frameworks.pytorch.parallel.node import NodeCall
from flatout.frameworks.pytorch.parallel.outside_state import named_as_cause
from flatout.frameworks.pytorch.parallel.pattern import Check, Pattern
from flatout.frameworks.pytorch.parallel.refusal import ChangesOutside, NotDivided
from flatout.frameworks.pytorch.seams.trees import tensors_of

Planner = Callable[["ModelDivision", tuple[Any, ...], dict[str, Any], Pattern], HeldByModel]
"""Finds how a model is divided, by a call of it and where the batch is in that, and takes its parameters."""


class ModelDivision(Division):
    """Divides the model of a module's calls."""

    planner: Planner | None = None
    """Until the first call."""
    samples_tell = False
    cuts_batches = False
    """Whether the batch is cut, beside the model."""
    sharing: Group
    """The ranks that share the model."""
    return_memory: Callable[[], None] = staticmethod(lambda: None)
    """Called when a call was computed both ways, which took as much memory as one process and more."""
    replicas: Group | None = None
    """Those that hold what this one holds; None where there are none."""

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_of((args, kwargs), unique=False)
        self.held.renew()
        kind = self._kind(args, kwargs, inputs)
        shapes = tuple(t.shape for t in inputs)
        pattern, check = self._patterns.get(kind), None
        if pattern is None or self._is_due(pattern, shapes, args, kwargs):
            former = pattern
            known = self._cut(args, kwargs, inputs, former)
            if self.planner is not None:
                self.confirmation.begin(inputs, first=True)
                with named_as_cause(self):
                    self.held, self.planner = self.planner(self, args, kwargs, known), None
            pattern, check = self.confirmation.together(args, kwargs, inputs, known, first=former is None)
            if former is not None:
                pattern.follow(former)
            self._note(pattern, shapes)
            self._patterns[kind] = pattern
            if not self._weighs and any(rule.kind == "mean" for rule in pattern.rules or ()):
                self._weighs = True
                self._patterns = {self._kind(args, kwargs, inputs): pattern}
        self.num_divided += 1
        self.last.keep(kind, pattern, args, kwargs, is_confirmed=check is not None)
        call = _TogetherCall(self, pattern, args, kwargs, check)
        differentiable = [t for t in inputs if t.requires_grad]
        return call.made(*differentiable, *self.held.parameters)

    def again(self, args: Any, kwargs: Any, pattern: Pattern) -> tuple[NodeCall, Sequence[torch.Tensor]]:
        """See `Division`."""
        inputs, self._since = tensors_of((args, kwargs), unique=False), pattern.confirmed_at
        found, check = self.confirmation.together(args, kwargs, inputs, pattern, first=False)
        return _TogetherCall(self, found, args, kwargs, check), check.whole.outputs

    def _cut(self, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], former: Pattern | None) -> Pattern:
        """Where the batch is in a call; nowhere, where it stays whole."""
        whole = Pattern(Cut((None,) * len(inputs)), None)
        if former is not None and (former.rules is None or former.decided):
            return former
        if not self.cuts_batches:
            return whole
        try:
            with self.held.at_once():
                return self.confirmation.confirmed(args, kwargs, inputs, None)[0]
        except ChangesOutside:
            raise
        except NotDivided as problem:
            self.confirmation.remark(f"batches are not cut: {problem.cause}")
            return whole


class _TogetherCall(NodeCall):
    """One call that all ranks compute together."""

    def __init__(self, division: ModelDivision, pattern: Pattern, args: Any, kwargs: Any, check: Check | None) -> None:
        super().__init__(division, pattern)
        self._division, self._check = division, check
        self._args, self._kwargs = args, kwargs
        self._passed: Any = None

    def forward(self) -> list[torch.Tensor]:
        """See `NodeCall`."""
        with torch.enable_grad():
            passed = replicas.passed(self._division, self._args, self._kwargs, self.pattern, silent=False)
        self._args = self._kwargs = None
        self.value, passed.value = passed.value, None
        self.mine, self._passed = passed.outputs, passed
        return [tensor.detach() for tensor in self.mine]

    def gone_back(self, gradients: Sequence[Any], *, keep: bool) -> Found:
        """See `NodeCall`."""
        division = self._division
        if self._check is not None:
            self.compared(gradients)
        with division.held.in_place():
            of_parameters, of_inputs = self._passed.backward(gradients, keep=keep)
        return [*of_inputs, *of_parameters]

    def compared(self, gradients: Sequence[Any]) -> None:
        """See `NodeCall`."""
        check, self._check = self._check, None
        assert check is not None
        with self.division.divergence_told():
            self.division.confirmation.check_together(check, gradients)
        self._division.return_memory()
