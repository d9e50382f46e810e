"""What does every mode give? Parameters held in its way, and calls that are computed with them: the one protocol.

*Replicate* holds whole parameters (`gradients.py`), *shard* some rows of each (`sharded_parameters.py`), *tensor* and
*pipeline* parts with which a rank computes its share of the model (`partial_parameters.py`). A batch is cut beside that
(`batch.py`). In: calls of a kind, and what is known of it. Out: outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.assembly import Rule
from flatout.frameworks.pytorch.parallel.cuts import Cut, Tensors
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import part_of
from flatout.frameworks.pytorch.seams.trees import tensors_of

Found = list[torch.Tensor | None]
"""Gradients; None where there is none."""

Leaves = Tensors
"""Whole parameters that a graph begins with, one for each that is trained; empty where those held are meant."""

WHOLE_EVERY = 100
"""A call is computed both ways every so many calls, times the ranks and one: that takes a rank about as long as so many
calls of its part as there are ranks, and one; so 1 % of the time."""


def is_rare(num: int, world: int) -> bool:
    """Whether the call of a kind with this number is computed both ways, for no other reason.

    >>> [num for num in range(1, 1025) if is_rare(num, 2)]
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 512, 600, 900, 1024]
    """
    return num & (num - 1) == 0 or num % (WHOLE_EVERY * (world + 1)) == 0


@dataclass(slots=True)
class Pattern:
    """How calls of one kind are divided, and what is known of it.

    Attributes:
        cut: Where the batch is in the inputs.
        rules: How each output is put together; None where every rank computes all of the batch.
        noise: Whether the call draws noise for samples.
        masks: Whether it draws masks of dropout.
        decided: Whether one rule alone gave each output; else calls are computed both ways until that is so.
        num_calls: Calls since the first.
        sizes: Shapes with which it was confirmed.
        num_changes: How often the script had changed something of the module at that time (`later_calls.py`).
        confirmed_at: The call of the module at which that was.
        is_sampled: Whether samples tell something of it (`sample_independence.py`).
        taken: Of which outputs the script took gradients, the last time.
    """

    cut: Cut
    rules: tuple[Rule, ...] | None
    noise: bool = False
    masks: bool = False
    decided: bool = True
    num_calls: int = 0
    sizes: set[tuple[Any, ...]] = field(default_factory=set)
    num_changes: int = 0
    confirmed_at: int = 0
    is_sampled: bool = True
    taken: tuple[bool, ...] = ()

    def follow(self, former: Pattern) -> None:
        """Take over what was known of the kind."""
        self.sizes, self.num_calls = former.sizes, former.num_calls
        self.is_sampled, self.taken = former.is_sampled, former.taken


@dataclass(slots=True)
class Computed:
    """Outputs, and the whole parameters that they were computed with."""

    outputs: list[torch.Tensor]
    leaves: Leaves


@dataclass(slots=True)
class Check:
    """A call that was computed on the whole batch and by ranks (`ForwardResult`), to be gone back through both ways."""

    whole: Computed
    mine: Any
    inputs: Any


class ForwardResult(Protocol):
    """A call that was computed: what the module returned, and the tensors in it."""

    value: Any
    outputs: list[torch.Tensor]

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """Gradients of all parameters and of inputs that want one, from those of outputs; `keep` the graph or not."""


class ParameterHolder:
    """The parameters of one module on this rank."""

    takes_mean = False
    """Whether `backward` takes the mean over ranks, each of which computes a part of the batch."""

    parameters: list[nn.Parameter]
    """The script's own objects, from which a divided call's node hangs."""

    @property
    def used(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.parameters if p.requires_grad]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What the graph of a call begins with, beside its inputs."""
        raise NotImplementedError

    def renew(self) -> None:
        """Follow what the script has done to the module's parameters since the last call."""
        raise NotImplementedError

    def at_once(self) -> AbstractContextManager[None]:
        """Within, `in_place` exchanges nothing in the middle of a call: it may raise on some ranks."""
        return nullcontext()

    def in_place(self) -> AbstractContextManager[None]:
        """Around a call and around its way back: the module computes with what is held."""
        raise NotImplementedError

    @contextmanager
    def in_whole(self) -> Iterator[Leaves]:
        """Around a call: the module computes as one process does, on every rank alike."""
        with self.in_place():
            yield ()

    @contextmanager
    def nudged(self, times: int) -> Iterator[None]:
        """Within, parameters are moved in their memory by up to `times` their last bit, the same for the same `times`.

        Graphs that wait for their way back do not take it for a change (`.data` has versions of its own): they are
        gone through when all is as it was.
        """
        parts = list(map(part_of, self.used))
        kept = [one.clone() for one in parts]
        generator = torch.Generator().manual_seed(times)
        try:
            for one in parts:
                noise = torch.rand(one.shape, generator=generator).mul_(2).sub_(1).to(one.device)
                one.data.mul_((1 + noise * times * torch.finfo(one.dtype).eps).to(one.dtype))
            yield
        finally:
            for one, former in zip(parts, kept, strict=True):
                one.data.copy_(former)

    def passed(
        self, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: Pattern, *, silent: bool
    ) -> ForwardResult:
        """Compute a call of the kind that `pattern` tells of; `silent`: nothing is drawn within."""
        del pattern, silent
        with torch.enable_grad(), self.in_place():
            return Pass(self, compute(*args, **kwargs), args, kwargs)

    def backward(self, outputs: Tensors, gradients: Tensors, *, keep: bool) -> Found:
        """Go back through what was computed here: the gradients of `parameters`."""
        raise NotImplementedError

    def gradients(self, outputs: Tensors, gradients: Tensors, leaves: Leaves) -> Found:
        """Gradients of those used where `in_whole` has computed with `leaves`, the same on all ranks."""
        if not outputs or not leaves:
            return [None] * len(leaves)
        return list(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))

    def close(self) -> None:
        """Hold on to no process group any more: its threads end with it."""


class Pass:
    """A call that was computed with what a rank holds; see `ForwardResult`. `around` is entered on its way back."""

    def __init__(
        self, held: ParameterHolder, value: Any, args: Any, kwargs: Any, around: Callable[[], Any] = nullcontext
    ) -> None:  # fmt: skip
        self.value, self.outputs = value, tensors_of(value)
        self._held, self._around = held, around
        self._entered = [t for t in tensors_of((args, kwargs), unique=False) if t.requires_grad]
        with torch.enable_grad():  # a parameter that is returned as it is keeps its own gradient
            self._leaving = [t.view_as(t) if t.is_leaf and t.requires_grad else t for t in self.outputs]

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """See `ForwardResult`."""
        pairs = [(o, g) for o, g in zip(self._leaving, gradients, strict=True) if g is not None and o.requires_grad]
        for tensor in self._entered:
            tensor.grad = None
        with self._around():
            found = self._held.backward([o for o, _ in pairs], [g for _, g in pairs], keep=keep)
        of_inputs = [tensor.grad for tensor in self._entered]
        for tensor in self._entered:
            tensor.grad = None
        return found, of_inputs


class Dividing(Protocol):
    """What those that help to divide the calls of a module use of `Division`."""

    name: str
    module: Callable[[], nn.Module]
    compute: Callable[..., Any]
    group: Group
    replicas: Group | None
    held: ParameterHolder
    remarks: list[str]
    refuse: Callable[[NotDivided], NoReturn]
    apart: Callable[[], AbstractContextManager[None]]
    changes: Any

    @property
    def holds_whole(self) -> bool:
        """Whether each rank has all parameters."""

    def trial(self) -> AbstractContextManager[Any]:
        """Around what is not the script's: nothing is drawn, and all is put back."""

    def refused(self, cause: str) -> NotDivided:
        """That calls of the module cannot be divided, and why."""

    def small(self, inputs: Sequence[torch.Tensor]) -> str:
        """That a batch has fewer samples than there are ranks; empty where it has enough."""

    def again(self, args: Any, kwargs: Any, pattern: Pattern) -> Check:
        """Compute a former call both ways."""

    def compare_gradients(self, check: Check, gradients: Sequence[Any]) -> None:
        """Compare the gradients of a call that was computed both ways."""
