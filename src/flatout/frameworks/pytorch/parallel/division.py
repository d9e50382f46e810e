"""How is one call of a model divided over ranks, and how sure is it that the outcome is that of the whole batch?

The call is computed on this rank's part of the batch, and its outputs are put together with those of the others; its
backward pass hands this rank its part of their gradient and gives back gradients summed over ranks. So the script sees
the whole batch, before and after. Of each kind the first call is computed both ways (`confirmation.py`). In: a call.
Out: what the whole batch gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from flatout.frameworks.pytorch.parallel import assembly, sample_independence
from flatout.frameworks.pytorch.parallel.assembly import Share
from flatout.frameworks.pytorch.parallel.batch import DividedCall
from flatout.frameworks.pytorch.parallel.call_signature import flags_of, skeleton
from flatout.frameworks.pytorch.parallel.confirmation import Confirmation
from flatout.frameworks.pytorch.parallel.cuts import Cut, Tensors
from flatout.frameworks.pytorch.parallel.gradients import Aliases
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.later_calls import Changes, LastCalls
from flatout.frameworks.pytorch.parallel.module_calls import called_modules
from flatout.frameworks.pytorch.parallel.protocol import Check, ParameterHolder, Pattern, is_rare
from flatout.frameworks.pytorch.parallel.refusal import FEWER_RANKS, ON_ONE_RANK, ChangesOutside, NotDivided
from flatout.frameworks.pytorch.seams.trees import tensors_of

Compute = Callable[..., Any]
Hold = Callable[[torch.nn.Module, Collection[int]], ParameterHolder]
"""Takes a module's parameters; told which modules it calls, by identity."""

Planner = Callable[["ModelDivision", tuple[Any, ...], dict[str, Any], Pattern], ParameterHolder]
"""Finds how a model is divided, by a call of it and where the batch is in that, and takes its parameters."""

NUM_CONFIRMED = 4
"""So many shapes of one kind of call are computed both ways; then the kind is trusted with other shapes."""

TOO_FEW = "has too few samples for"


class Division:
    """Divides the calls of one module, which are computed as the script and the engaged levers say (`compute`).

    `refuse` is told what cannot be divided, and ends the run. `apart` is entered while a call is gone back through:
    modules that are called then are no calls of the script's.
    """

    samples_tell = True
    """Whether ranks compute different samples."""

    def __init__(
        self, name: str, module: Callable[[], torch.nn.Module], compute: Compute, group: Group,
        refuse: Callable[[NotDivided], NoReturn], apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self.name = name
        self.refuse, self.apart = refuse, apart
        self.compare: Callable[[], bool] = lambda: False
        """Makes sure that ranks have not diverged; whether rank 0's parameters were given to all."""
        self.module, self.compute, self.group = module, compute, group
        self.sharing = group
        self.replicas: Group | None = group if self.samples_tell else None
        """Those that compute a part of the batch each; None where there are none."""
        self.held: ParameterHolder = Aliases(module(), group)
        self.hold: Hold | None = None
        """How parameters are held once it is known how calls are divided; None: as they are."""
        self.confirmation = Confirmation(self)
        self.changes, self.last = Changes(), LastCalls(self)
        self._num_changes = self._since = 0
        self._patterns: dict[tuple[Any, ...], Pattern] = {}
        self._weighs = False
        """Whether means are put together, whose weights depend on which targets are ignored."""
        self.num_divided = self.num_whole = 0
        self.why_whole = ""
        """Why a call was not divided."""
        self.remarks: list[str] = []

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The call's outputs for the whole batch."""
        try:
            self._since = 0
            self._num_changes += self.changes.look()
            out = self._called(args, kwargs)
            self.changes.note(self.module())
            return out
        except NotDivided as problem:
            self.refuse(problem)

    def _called(self, args: Any, kwargs: Any) -> Any:
        self.held.renew()
        inputs = tensors_of((args, kwargs), unique=False)
        kind, shapes = self._kind(args, kwargs, inputs), tuple(t.shape for t in inputs)
        pattern, check = self._patterns.get(kind), None
        if pattern is None or self._is_due(pattern, shapes, args, kwargs):
            former = pattern
            world = self.group.world
            is_small = former is not None and (former.cut.num_samples(inputs) or 0) < world
            if self.samples_tell and (is_small or all(max(t.shape, default=0) < world for t in inputs)):
                self.why_whole = self.small(inputs)
                return self._whole(args, kwargs)
            pattern, check = self.confirmed(args, kwargs, inputs, former)
            if former is not None:
                pattern.follow(former)
            pattern.sizes.add(shapes)
            pattern.num_changes, pattern.confirmed_at = self._num_changes, self.num_divided + self.num_whole + 1
            self._patterns[kind] = pattern
            if not self._weighs and any(rule.kind == "mean" for rule in pattern.rules or ()):
                self._weighs = True
                self._patterns = {self._kind(args, kwargs, inputs): pattern}
        if self.samples_tell and self._stays_whole(pattern, inputs):
            return self._whole(args, kwargs)  # a small last batch: every rank computes all of it, with the same outcome
        self.num_divided += 1
        self.last.keep(kind, pattern, args, kwargs, is_confirmed=check is not None)
        return DividedCall(self, pattern, args, kwargs, check).made()

    def again(self, args: Any, kwargs: Any, pattern: Pattern) -> Check:
        """Compute a former call both ways; or `NotDivided`."""
        self._since = pattern.confirmed_at
        return self.confirmed(args, kwargs, tensors_of((args, kwargs), unique=False), pattern)[1]

    def compare_gradients(self, check: Check, gradients: Sequence[Any]) -> None:
        """Compare the gradients of a call that was computed both ways, by those of its outputs; or `NotDivided`."""
        try:
            self.confirmation.check_gradients(check, gradients)
        except ChangesOutside:  # this rank alone may have found it: the others are in another exchange
            raise
        except NotDivided:
            self.compare()  # where ranks have diverged, that is told
            raise

    def confirmed(self, args: Any, kwargs: Any, inputs: Tensors, former: Pattern | None) -> tuple[Pattern, Check]:
        """How a call is divided, which is computed both ways; or `NotDivided`."""
        pattern, check = self._found(args, kwargs, inputs, former)
        check.mine.fit(pattern.rules)
        return pattern, check

    def _found(self, args: Any, kwargs: Any, inputs: Tensors, known: Pattern | None) -> tuple[Pattern, Check]:
        """The first time it is found with parameters that are there at once, where guesses may raise."""
        if known is not None:
            try:
                return self.confirmation.confirmed(args, kwargs, inputs, known)
            except ChangesOutside:
                raise
            except NotDivided:  # on all ranks alike; where they have diverged, that is the reason, or it is mended
                if not self.compare():
                    raise
                return self.confirmation.confirmed(args, kwargs, inputs, known)
        if self.hold is None and self.holds_whole:
            return self.confirmation.confirmed(args, kwargs, inputs, None)
        with called_modules() as called, self.held.at_once():
            pattern, check = self.confirmation.confirmed(args, kwargs, inputs, None)
        del check  # of what is about to be held otherwise
        if self.hold is not None:
            self.held, self.hold = self.hold(self.module(), called), None
        return self.confirmation.confirmed(args, kwargs, inputs, pattern)

    def trial(self) -> AbstractContextManager[Any]:
        """See `Confirmation.trial`."""
        return self.confirmation.trial()

    @property
    def holds_whole(self) -> bool:
        """Whether each rank has all parameters."""
        return isinstance(self.held, Aliases)

    def _kind(self, args: Any, kwargs: Any, inputs: Tensors) -> tuple[Any, ...]:
        switches = skeleton((args, kwargs)), flags_of(self.module())
        ignoring = tuple(assembly.has_ignored(t) for t in inputs) if self._weighs else ()
        return (self.module().training, switches, ignoring, *((t.dim(), t.dtype, t.requires_grad) for t in inputs))

    def _is_due(self, pattern: Pattern, shapes: tuple[Any, ...], args: Any, kwargs: Any) -> bool:
        """Whether a call is computed both ways: new shapes, after changes, no rule is sure yet, samples disagree."""
        pattern.num_calls += 1
        num, self._since = pattern.num_calls, pattern.confirmed_at
        if is_rare(num, self.group.world) or not pattern.decided or pattern.num_changes != self._num_changes:
            return True
        if shapes not in pattern.sizes and len(pattern.sizes) < NUM_CONFIRMED:
            return True
        return (
            self.samples_tell
            and sample_independence.is_due(num)
            and not sample_independence.agrees(self, pattern, args, kwargs)
        )

    def _stays_whole(self, pattern: Pattern, inputs: Tensors) -> bool:
        """Whether there are too few samples; or nothing of a rank's part counts, so that it has no way back."""
        num = pattern.cut.num_samples(inputs)
        if num is None:
            raise self.refused("its inputs do not agree on the number of samples")
        means = [rule for rule in pattern.rules or () if rule.kind == "mean" and rule.weigh >= 0]
        if num < self.group.world or self.holds_whole or not means:
            return num < self.group.world
        share = Share.of(inputs, pattern.cut.dims, num, self.group.world)
        return any(not share.weight(rule, rank) for rule in means for rank in range(self.group.world))

    def small(self, inputs: Tensors) -> str:
        """That a batch has fewer samples than there are ranks, as far as its first dimension tells."""
        num = next((t.shape[0] for t in inputs if t.dim()), None)
        if num is None:
            return f"`{self.name}` is called without a tensor"
        return f"a batch of {num} {TOO_FEW} {self.group.world} ranks" if num < self.group.world else ""

    def _whole(self, args: Any, kwargs: Any) -> Any:
        self.num_whole += 1
        if self.holds_whole:
            return self.compute(*args, **kwargs)
        inputs = tensors_of((args, kwargs), unique=False)
        every = Pattern(Cut((None,) * len(inputs)), None)
        return DividedCall(self, every, args, kwargs, None).made()

    def refused(self, cause: str) -> NotDivided:
        """That calls of this module cannot be divided, and why."""
        since = f"; its call {self._since:,} was the last that is known to be right" if self._since else ""
        return NotDivided(
            f"the calls of `{self.name}` cannot be divided over ranks{' any more' if since else ''}",
            cause=cause + since,
            hint=FEWER_RANKS if TOO_FEW in cause else ON_ONE_RANK,
        )


class ModelDivision(Division):
    """Divides the model of a module's calls: every rank, or one in each group of them, has the whole batch."""

    samples_tell = False
    planner: Planner | None = None
    """Until the first call."""
    cuts_batches = False
    """Whether the batch is cut, beside the model."""
    return_memory: Callable[[], None] = staticmethod(lambda: None)
    """Called when a call was computed both ways, which took as much memory as one process and more."""

    def confirmed(self, args: Any, kwargs: Any, inputs: Tensors, former: Pattern | None) -> tuple[Pattern, Check]:
        """See `Division`."""
        known = self._cut(args, kwargs, inputs, former)
        if self.planner is not None:
            self.confirmation.begin(inputs, first=True)
            with self.confirmation.nothing_outside():
                self.held, self.planner = self.planner(self, args, kwargs, known), None
        return self.confirmation.together(args, kwargs, inputs, known, first=former is None)

    def _cut(self, args: Any, kwargs: Any, inputs: Tensors, former: Pattern | None) -> Pattern:
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

    def compare_gradients(self, check: Check, gradients: Sequence[Any]) -> None:
        """See `Division`."""
        super().compare_gradients(check, gradients)
        self.return_memory()
