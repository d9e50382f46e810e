"""How is one call of a model divided over ranks, and how sure is it that the outcome is that of the whole batch?

The call is computed on this rank's part of the batch, and its outputs are put together with those of the others; its
backward pass hands this rank its part of their gradient and gives back gradients summed over ranks. So the script sees
the whole batch, before and after. Of each kind the first call is computed both ways (`confirmation.py`). In: a call.
Out: what the whole batch gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from flatout.frameworks.pytorch.parallel import assembly, batch_norm, sampling
from flatout.frameworks.pytorch.parallel.assembly import Rule, Share
from flatout.frameworks.pytorch.parallel.called import Called
from flatout.frameworks.pytorch.parallel.changes import Changes
from flatout.frameworks.pytorch.parallel.confirmation import Confirmation
from flatout.frameworks.pytorch.parallel.cuts import Cut, part_entering
from flatout.frameworks.pytorch.parallel.draws import Fork, Noise
from flatout.frameworks.pytorch.parallel.gradients import Aliases
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Held
from flatout.frameworks.pytorch.parallel.last_calls import LastCalls
from flatout.frameworks.pytorch.parallel.node import NodeCall
from flatout.frameworks.pytorch.parallel.pattern import Check, Pattern, is_rare
from flatout.frameworks.pytorch.parallel.refusal import FEWER_RANKS, ON_ONE_RANK, ChangesOutside, NotDivided
from flatout.frameworks.pytorch.parallel.skeleton import flags_of, skeleton
from flatout.frameworks.pytorch.seams.trees import tensors_of

Compute = Callable[..., Any]
Hold = Callable[[torch.nn.Module, Collection[int]], Held]
"""Takes a module's parameters; told which modules it calls, by identity."""

NUM_CONFIRMED = 4
"""So many shapes of one kind of call are computed both ways; then the kind is trusted with other shapes."""

SAMPLE_EVERY = 16
"""Calls between looks at samples: one takes a fifth of a step of a small model, and so about 1 % of the time."""

TOO_FEW = "has too few samples for"


class Division:
    """Divides the calls of one module.

    Args:
        name: What the module is called.
        module: Gives the module.
        compute: Computes a call as the script and the engaged levers say.
        group: All ranks.
        refuse: Told what cannot be divided; it ends the run.
        apart: Entered while a call is gone back through: modules that are called then are no calls of the script's.
    """

    samples_tell = True
    """Whether ranks compute different samples."""

    def __init__(
        self, name: str, module: Callable[[], torch.nn.Module], compute: Compute, group: Group,
        refuse: Callable[[NotDivided], NoReturn], apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self.name = name
        self.refuse, self.apart = refuse, apart
        self.compare: Callable[[], None] = lambda: None
        """Makes sure that ranks have not diverged."""
        self.module, self.compute, self.group = module, compute, group
        self.held: Held = Aliases(module(), group)
        self.hold: Hold | None = None
        """How parameters are held once it is known how calls are divided; None: as they are."""
        self.confirmation = Confirmation(self)
        self.changes, self.last = Changes(), LastCalls(self)
        self._num_changes = self._since = 0
        self._fork = Fork(group.rank)
        self._patterns: dict[tuple[Any, ...], Pattern] = {}
        self._weighs = False
        """Whether means are put together, whose weights depend on which targets are ignored."""
        self.num_divided = self.num_whole = 0
        self.why_whole = ""
        """Why a call was not divided."""
        self.remarks: list[str] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call's outputs for the whole batch."""
        try:
            self._since = 0
            self._num_changes += self.changes.look()
            out = self._called(args, kwargs)
            self.changes.note(self.module())
            return out
        except NotDivided as problem:
            self.refuse(problem)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.held.renew()
        inputs = tensors_of((args, kwargs), unique=False)
        kind = self._kind(args, kwargs, inputs)
        pattern = self._patterns.get(kind)
        shapes = tuple(t.shape for t in inputs)
        check = None
        if pattern is None or self._is_due(pattern, shapes, args, kwargs):
            if all(max(t.shape, default=0) < self.group.world for t in inputs) or (
                pattern is not None and (pattern.cut.num_samples(inputs) or 0) < self.group.world
            ):
                self.why_whole = self.small(inputs)
                return self._whole(args, kwargs)
            former = pattern
            pattern, check = self._confirmed(args, kwargs, inputs, former)
            if former is not None:
                self._make_alike(pattern, former)
                pattern.follow(former)
            self._note(pattern, shapes)
            self._patterns[kind] = pattern
            if not self._weighs and any(rule.kind == "mean" for rule in pattern.rules or ()):
                self._weighs = True
                self._patterns = {self._kind(args, kwargs, inputs): pattern}
        num = pattern.cut.num_samples(inputs)
        if num is None:
            raise self.refused("its inputs do not agree on the number of samples")
        if num < self.group.world or self._has_idle(pattern, num, inputs):
            return self._whole(args, kwargs)  # a small last batch: every rank computes all of it, with the same outcome
        self.last.keep(kind, pattern, args, kwargs, is_confirmed=check is not None)
        return self._divided(pattern, num, args, kwargs, inputs, check)

    def _make_alike(self, pattern: Pattern, former: Pattern) -> None:
        """Calls of a kind are put together in one way; one batch may tell less of it than an earlier one did."""
        if former.decided and pattern.decided and not former.is_alike(pattern):
            raise self.refused("how its outputs make up those of the whole batch changes from call to call")
        if former.decided:
            pattern.rules, pattern.decided = former.rules_with(pattern), True

    def again(self, args: Any, kwargs: Any, pattern: Pattern) -> tuple[NodeCall, Sequence[torch.Tensor]]:
        """Compute a former call both ways; with its outputs, of whose gradients those of both may be compared.

        Raises:
            NotDivided: It is not what the whole batch gives.
        """
        inputs, self._since = tensors_of((args, kwargs), unique=False), pattern.confirmed_at
        found, check = self._confirmed(args, kwargs, inputs, pattern)
        self._make_alike(found, pattern)
        share = Share.of(inputs, found.cut.dims, found.cut.num_samples(inputs) or 0, self.group.world)
        call = _Call(self, found, share, args, kwargs, check)
        call.fit(check.mine.outputs)
        return call, check.whole.outputs

    def _note(self, pattern: Pattern, shapes: tuple[Any, ...]) -> None:
        """A call was found to be what the whole batch gives."""
        pattern.sizes.add(shapes)
        pattern.num_changes, pattern.confirmed_at = self._num_changes, self.num_divided + self.num_whole + 1

    def _confirmed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[torch.Tensor], known: Pattern | None
    ) -> tuple[Pattern, Check]:
        """How a call is divided. It is found with parameters that are there at once, where guesses may raise."""
        if known is not None:
            try:
                return self.confirmation.confirmed(args, kwargs, inputs, known)
            except ChangesOutside:
                raise
            except NotDivided:  # on all ranks alike; where they have diverged, that is the reason, or it is mended
                self.compare()
                return self.confirmation.confirmed(args, kwargs, inputs, known)
        if self.hold is None and self.holds_whole:
            return self.confirmation.confirmed(args, kwargs, inputs, None)
        with Called() as called, self.held.at_once():
            pattern, check = self.confirmation.confirmed(args, kwargs, inputs, None)
        del check  # of what is about to be held otherwise
        if self.hold is not None:
            self.held, self.hold = self.hold(self.module(), called.modules), None
        return self.confirmation.confirmed(args, kwargs, inputs, pattern)

    @property
    def holds_whole(self) -> bool:
        """Whether each rank has all parameters."""
        return isinstance(self.held, Aliases)

    def _kind(self, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
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
        return self.samples_tell and num % SAMPLE_EVERY == 0 and not sampling.agrees(self, pattern, args, kwargs)

    def _has_idle(self, pattern: Pattern, num: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether nothing of a rank's part counts, so that it has no way back on which parameters are gathered."""
        means = [rule for rule in pattern.rules or () if rule.kind == "mean" and rule.weigh >= 0]
        if self.holds_whole or not means:
            return False
        share = Share.of(inputs, pattern.cut.dims, num, self.group.world)
        return any(not share.weight(rule, rank) for rule in means for rank in range(self.group.world))

    def small(self, inputs: Sequence[torch.Tensor]) -> str:
        """That a batch has fewer samples than there are ranks, as far as its first dimension tells."""
        num = next((t.shape[0] for t in inputs if t.dim()), None)
        if num is None:
            return f"`{self.name}` is called without a tensor"
        return f"a batch of {num} {TOO_FEW} {self.group.world} ranks" if num < self.group.world else ""

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_whole += 1
        if self.holds_whole:
            return self.compute(*args, **kwargs)
        inputs = tensors_of((args, kwargs), unique=False)
        every = Pattern(Cut((None,) * len(inputs)), None)
        return self._divided(every, 0, args, kwargs, inputs, None)

    @contextmanager
    def divergence_told(self) -> Iterator[None]:
        """What is refused within while ranks have diverged is told as that."""
        try:
            yield
        except ChangesOutside:
            raise
        except NotDivided:
            self.compare()
            raise

    def refused(self, cause: str) -> NotDivided:
        """That calls of this module cannot be divided, and why."""
        since = f"; its call {self._since:,} was the last that is known to be right" if self._since else ""
        return NotDivided(
            f"the calls of `{self.name}` cannot be divided over ranks{' any more' if since else ''}",
            cause=cause + since,
            hint=FEWER_RANKS if TOO_FEW in cause else ON_ONE_RANK,
        )

    # -- a divided call ------------------------------------------------------------------------------------------

    def _divided(
        self, pattern: Pattern, num: int, args: tuple[Any, ...], kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor], check: Check | None,
    ) -> Any:  # fmt: skip
        self.num_divided += pattern.rules is not None
        share = Share.of(inputs, pattern.cut.dims, num, self.group.world)
        call = _Call(self, pattern, share, args, kwargs, check)
        differentiable = [t for t in inputs if t.requires_grad]
        return call.made(*differentiable, *self.held.parameters)

    def computed(self, pattern: Pattern, share: Share, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of this rank's part, and what it entered with."""
        low, high = share.edges[self.group.rank], share.edges[self.group.rank + 1]
        new_args, new_kwargs, entered = part_entering(args, kwargs, share.dims, low, high)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.held.in_place())
            stack.enter_context(batch_norm.synchronised(self.group))
            if pattern.masks:
                stack.enter_context(self._fork.on())
            if pattern.noise:
                stack.enter_context(Noise(share, self.group.rank, self.held.parameters).on())
            return self.compute(*new_args, **new_kwargs), entered


class _Call(NodeCall):
    """One divided call, between its way forward and its way back."""

    def __init__(
        self, division: Division, pattern: Pattern, share: Share, args: Any, kwargs: Any, check: Check | None
    ) -> None:
        super().__init__(division, pattern)
        self.share, self.check = share, check
        self._args, self._kwargs = args, kwargs
        self.rules: tuple[Rule, ...] = ()
        self.entered: list[torch.Tensor] = []
        self._group = division.group

    def forward(self) -> list[torch.Tensor]:
        """Compute this rank's part, and put its outputs together with the others'."""
        value, self.entered = self.division.computed(self.pattern, self.share, self._args, self._kwargs)
        self._args = self._kwargs = None
        self.value = value
        self.mine = tensors_of(value)
        with torch.enable_grad():  # a parameter that is returned as it is would be ready before its gradient is
            self._leaving = [t.view_as(t) if t.is_leaf and t.requires_grad else t for t in self.mine]
        self.fit(self.mine)
        name = f"outputs of `{self.division.name}`"
        return assembly.of_all_ranks(self.mine, self.rules, self.share, self._group, name)

    def fit(self, mine: Sequence[torch.Tensor]) -> None:
        """How this rank's outputs are put together with those of the others."""
        rules = self.pattern.rules or tuple(Rule("same") for _ in mine)
        if len(rules) != len(mine):
            raise self.division.refused(f"it returns {len(mine)} tensors, and {len(rules)} before")
        pairs = zip(rules, mine, strict=True)
        self.rules = tuple(assembly.fitted(*pair, self.share, self._group.rank) for pair in pairs)

    def gone_back(self, gradients: Sequence[Any], *, keep: bool) -> list[Any]:
        """See `NodeCall`: gradients are summed over ranks."""
        if self.check is not None:
            self.compared(gradients)
        with self._going_back():
            return self._gone_back(gradients, keep=keep)

    @contextmanager
    def _going_back(self) -> Iterator[None]:
        held, group = self.division.held, self._group
        with held.in_place(), batch_norm.synchronised(group), ExitStack() as stack:
            if self.pattern.noise:  # what is checkpointed is computed once more
                stack.enter_context(Noise(self.share, group.rank, held.parameters).on())
            yield

    def compared(self, gradients: Sequence[Any]) -> None:
        """See `NodeCall`."""
        check, self.check = self.check, None
        assert check is not None
        with self.division.divergence_told(), self._going_back():
            self.division.confirmation.check_gradients(check, self.rules, self.share, gradients)

    def _gone_back(self, gradients: Sequence[Any], *, keep: bool) -> list[Any]:
        division, group = self.division, self._group
        outs, grads = [], []
        for tensor, rule, gradient in zip(self._leaving, self.rules, gradients, strict=True):
            if tensor.requires_grad and gradient is not None:
                mine = assembly.gradient_of(rule, gradient, self.share, group.rank, group.world)
                if mine is not None:
                    outs.append(tensor)
                    grads.append(mine)
        for tensor in self.entered:
            tensor.grad = None
        of_parameters = division.held.backward(outs, grads, keep=keep)
        found = [None if tensor.grad is None else tensor.grad / group.world for tensor in self.entered]
        for tensor in self.entered:
            tensor.grad = None
        return [*assembly.gradients_of_inputs(found, self.entered, self.share, group), *of_parameters]
