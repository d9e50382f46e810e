"""accumulation: an optimizer updates at every N-th call of `step`, with the mean of the gradients of N batches.

Each of N calls hands over the gradients that stand there; the N-th alone updates. They are summed apart from `.grad`,
so that a script clears, unscales and reads its own as ever, an optimizer's gradients never mix with another's, and
each of several optimizers counts for itself; that takes the memory of one more gradient. The learning rate follows as
with `batch_size`: N times the rate for SGD, the square root of N times for Adam and its kin, while the optimizer
updates; what the script reads is what it wrote. PyTorch's `clip_grad_norm_` and `clip_grad_value_` clip the mean, once
for each update. A closure is evaluated at each call.

What a script does for each batch it goes on doing for each batch: schedules, printing, averages of weights, numbers of
steps that it has written down, the scale of a `GradScaler` (a batch that overflows is left out of the group). What
waits for an update (hooks on updates, `state` of the optimizer) waits for the N-th call. Groups go on over the end of
a pass; one that is not complete when the run ends is dropped. To flatout a step is an update, so of N batches.

Where it cannot do that it stops, with the reason, and each call updates as in plain from there on.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from inspect import getattr_static
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch.seams.learning_rates import RULES, Changed, restore, scale, without_rule
from flatout.guest.interruptions import raised_by_handler
from flatout.guest.tracebacks import hide_ours
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from flatout.frameworks.pytorch.seams.clippings import Clipping
    from flatout.frameworks.pytorch.seams.patches import Patch
    from flatout.frameworks.pytorch.seams.summed_gradients import SummedGradients
    from flatout.frameworks.pytorch.session import Session


class Accumulation(Lever):
    """`step` of optimizers."""

    name = "accumulation"
    parameter = "num"
    summary = "one update of `num` batches' mean gradient; the rate of SGD is `num` times, of Adam its root as large"
    class_ = "semantics"
    shortens: ClassVar = ("optimizer",)
    toggles = "process"
    check = "updates"
    least = 2

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """One process, optimizers for which there is a rule, and a script that does not accumulate itself."""
        if facts.distributed:
            return SEVERAL_PROCESSES
        if facts.step_rhythm != "optimizer" or not facts.optimizers:
            return "no optimizer updates the parameters, so there is no update that could be held back"
        several = next((optimizer.name for optimizer in facts.optimizers if optimizer.has_closure), None)
        if several is not None:
            return f"`{several}` computes gradients several times in an update"
        fetches = max((loader.fetches_per_step for loader in facts.loaders), default=0.0)
        unknown = without_rule(optimizer.name for optimizer in facts.optimizers)
        return unknown or why_accumulated(fetches / (facts.calls_per_update * facts.optimizers_per_step))

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """None: it is not tried, for no step tells what it does to the training."""
        return ()

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Optimizers that are made from here on."""
        session.kept[self.name] = grouped = Grouped(int(settings["num"]), session)
        grouped.begin()

    def release(self, session: Session) -> None:
        """Each call updates again; the gradients of a group that was not complete are dropped."""
        grouped = session.kept.pop(self.name, None)
        if grouped is not None:
            grouped.end()

    def evidence(self, session: Session) -> str | None:
        """Updates made of so many batches, with the rate that belongs to them."""
        grouped = session.kept.get(self.name)
        if grouped is None:
            return None
        wrong = grouped.wrong()
        if wrong is not None:
            session.unavailable[self.name] = wrong
            return None
        session.unavailable.pop(self.name, None)
        return grouped.proof()


SEVERAL_PROCESSES = "several processes train together"

MADE = "_patch_step_function"
"""What PyTorch calls for each optimizer as it is made, copied or read from a file."""


def why_accumulated(fetches_per_call: float) -> str | None:
    """That the script accumulates already, by the batches that it draws for each call of `step`; None where not."""
    num = round(fetches_per_call)
    return f"the script accumulates gradients itself, of {num} batches: change its own number" if num > 1 else None


def calls_per_update(session: Session) -> int:
    """Calls of `step` of which one update is made in this process."""
    grouped = session.kept.get(Accumulation.name)
    return grouped.num if grouped is not None and not grouped.failed else 1


class Grouped:
    """Updates of `num` batches.

    Attributes:
        num: Calls of `step` in a group.
        updates: By class of optimizer the updates made of whole groups.
        failed: Why it has stopped, in words; empty where it has not.
    """

    def __init__(self, num: int, session: Session) -> None:
        from flatout.frameworks.pytorch.seams.clippings import Clippings

        self.num = num
        self.updates: dict[str, int] = {}
        self.failed = ""
        self._session = session
        self._sums: weakref.WeakKeyDictionary[Optimizer, SummedGradients] = weakref.WeakKeyDictionary()
        self._clippings = Clippings(self._held_back)
        self._updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._under_way = _UnderWay()
        self._kinds: set[type] = set()
        """Classes of optimizers whose `step` is patched."""
        self._patches: list[Patch] = []

    def begin(self) -> None:
        """From here on."""
        from torch.optim import Optimizer

        from flatout.frameworks.pytorch.seams.patches import Patch
        from flatout.frameworks.pytorch.session import Unavailable

        if not hasattr(Optimizer, MADE):
            raise Unavailable("this PyTorch does not tell when an optimizer is made")
        self._patches = [Patch(Optimizer, MADE, self._following)]
        self._clippings.begin()
        self._session.holds_back = True

    def end(self) -> None:
        """No longer."""
        for patch in self._patches:
            patch.remove()
        self._patches = []
        self._session.holds_back = False
        self._sums.clear()
        self._clippings.end()

    def wrong(self) -> str | None:
        """Why the training is not what was asked for, in words; None where it is."""
        if self.failed:
            return self.failed
        if not self.updates:
            return f"no optimizer has been called {self.num} times yet"
        loaders, calls = self._session.loaders, list(self._updates.values()) or [1]
        fetches = max(map(loaders.fetches_per_step, loaders.training), default=0.0)
        return why_accumulated(fetches / (self.num * sum(calls) / min(calls)))  # in each step the rarest updates once

    def proof(self) -> str | None:
        """What was made, once there were updates."""
        rates = [
            f"{num} update{'s' * (num != 1)} of `{name}`, each of {self.num} batches, "
            f"at {self.num ** RULES[name]:.3g} times its rate"
            for name, num in self.updates.items()
        ]
        return "; ".join(rates) or None

    # -- optimizers ----------------------------------------------------------------------------------------------

    def _following(self, original: Any, patch: Patch) -> Any:
        """What an optimizer does as it is made, or made from a file: PyTorch puts its hooks around `step`."""

        @wraps(original)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if patch.active and not self.failed:
                self._meet(optimizer)

        return made

    def _meet(self, optimizer: Optimizer) -> SummedGradients:
        from flatout.frameworks.pytorch.seams.patches import Patch
        from flatout.frameworks.pytorch.seams.summed_gradients import SummedGradients

        kind = type(optimizer)
        self._sums[optimizer] = sums = SummedGradients(1 / self.num)
        if kind not in self._kinds:
            self._kinds.add(kind)
            if isinstance(getattr_static(kind, "step"), FunctionType):
                self._patches.append(Patch(kind, "step", self._grouping))
            else:  # another descriptor binds in a way of its own
                self._stop(f"`{kind.__name__}.step` is no plain function")
        return sums

    def _held_back(self) -> Collection[int]:
        """Parameters whose clipping is to wait."""
        if self.failed or self._session.silent or self._session.comparing:
            return ()
        return {id(p) for optimizer in self._sums for p in parameters_of(optimizer)}

    def _grouping(self, original: Any, patch: Patch) -> Any:
        import torch

        is_compiling, session = torch.compiler.is_compiling, self._session

        @wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                if (
                    is_compiling()
                    or not patch.active
                    or self.failed
                    or self._under_way.num  # part of an update that is made
                    or session.silent
                    or session.comparing
                ):
                    return original(optimizer, *args, **kwargs)
                return self._called(original, optimizer, args, kwargs)
            except BaseException as problem:
                hide_ours(problem)
                raise

        return step

    # -- calls of `step` -----------------------------------------------------------------------------------------

    def _called(self, original: Any, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        reason = why_not(optimizer, kwargs)
        if reason is not None:
            self._stop(reason)
            return original(optimizer, *args, **kwargs)
        sums = self._sums.get(optimizer) or self._meet(optimizer)
        closure = kwargs.get("closure", args[0] if args else None)
        if sums.num + 1 < self.num:
            loss = self._hold_back(optimizer, sums, closure)
            if self.failed:  # only now: these gradients, which the closure has computed, are to update after all
                original(optimizer)
            return loss
        changed: list[Changed] = []
        evaluate = self._preparing(optimizer, closure, changed)
        if closure is None:
            evaluate()
        elif "closure" in kwargs:
            kwargs = {**kwargs, "closure": evaluate}
        else:
            args = (evaluate, *args[1:])
        self._under_way.num += 1
        try:
            return original(optimizer, *args, **kwargs)
        except BaseException:
            for group, rate, _ in changed:  # what others put in its place for this update is nobody's now
                group["lr"] = rate
            raise
        finally:
            self._under_way.num -= 1
            restore(changed)

    def _preparing(self, optimizer: Optimizer, closure: Any, changed: list[Changed]) -> Callable[..., Any]:
        """The closure, if any, after whose first evaluation gradients and rates are made those of the group."""
        is_prepared = False

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_prepared
            loss = closure(*args, **kwargs) if closure is not None else None
            if not is_prepared:
                is_prepared = True
                with self._watched():
                    changed.extend(self._average(optimizer))
            return loss

        return evaluate

    def _hold_back(self, optimizer: Optimizer, sums: SummedGradients, closure: Callable[[], Any] | None) -> Any:
        """One of the first calls of a group: its gradients are kept, and nothing is updated."""
        import torch

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = parameters_of(optimizer)
        with self._watched():
            if self._clippings_of(parameters) is not None:  # that of the whole group is what counts
                sums.add(parameters)
        return loss

    def _average(self, optimizer: Optimizer) -> list[Changed]:
        """Gradients are complete: make them the group's, and the rate as well."""
        parameters = parameters_of(optimizer)
        clippings = self._clippings_of(parameters)
        if clippings is None:
            return []
        self._sums[optimizer].average(parameters)
        for one in clippings:
            one.make()
        name = type(optimizer).__name__
        self.updates[name] = self.updates.get(name, 0) + 1
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        return scale(optimizer, self.num ** RULES[name])

    def _clippings_of(self, parameters: list[Any]) -> list[Clipping] | None:
        """How these gradients are to be clipped, as noted since the last call; None where that has stopped all."""
        ours = set(map(id, parameters))
        taken = self._clippings.take(ours)
        if all(p.grad is None or id(p) in ours for one in taken for p in one.parameters):
            return taken
        for one in taken:
            one.make()
        self._stop("gradients are clipped together with those of parameters that the optimizer does not have")
        return None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """What breaks of ours within it stops the grouping, and not the training."""
        try:
            yield
        except Exception as problem:
            if raised_by_handler(problem):
                raise
            self._stop(f"gradients could not be summed: {type(problem).__name__}: {problem}"[:200])

    def _stop(self, reason: str) -> None:
        """Each call updates from here on; clipping that was noted is made, for an update may follow at once."""
        self.failed = reason
        self._session.holds_back = False
        for sums in self._sums.values():
            sums.forget()
        self._clippings.make_all()


class _UnderWay(threading.local):
    """Updates that are made in a thread at present, one within the other."""

    num = 0


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """What it updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def why_not(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> str | None:
    """Why calls of its `step` cannot be held back as things stand, in a few words; None where they can."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return SEVERAL_PROCESSES
    if getattr(optimizer, "found_inf", None) is not None or "grad_scaler" in kwargs:
        return "a `GradScaler` hands gradients to a fused update that are still scaled"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "the script captures the update in a CUDA graph"
    return without_rule((type(optimizer).__name__,))
