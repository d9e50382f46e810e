"""When does a step end, and when is its last update about to be made? Hooks on optimizers; fetches or calls else.

Hooks that PyTorch offers for all optimizers tell of updates; a gradient scaler that skips one is told of as well. An
update that another one makes within its own (Lookahead, a subclass that calls its base) is part of that one. A script
that updates by hand shows no update: then a step ends when the next batch is fetched, or the model called again,
after gradients were taken. Of one that trains nothing `inference.py` says what a step is. Nothing here may raise into
the script. In: updates, backward passes, fetches, calls. Out: ends of steps.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import wraps
from itertools import count
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from flatout.frameworks.pytorch.inference import Inference
from flatout.frameworks.pytorch.observe.clock import BASE
from flatout.frameworks.pytorch.seams.owners import num_optimizers, with_gradients
from flatout.frameworks.pytorch.seams.patches import Patch, remove_all
from flatout.frameworks.pytorch.seams.step_period import StepPeriod
from flatout.frameworks.pytorch.seams.update_hooks import UpdateHook, leave_uncompiled, nothing, within_update
from flatout.guest.tracebacks import hide_ours
from flatout.records.facts import EndedBy

BACKWARDS_WITHOUT_UPDATE = 20
"""After so many backward passes without an optimizer update that shows, fetches and calls are taken for steps."""

BACKWARDS_OF_ONE_UPDATE = 320
"""The same where an optimizer exists: it may be accumulating gradients."""

PATIENCE_S = 10.0
"""Seconds for which optimizers that have not updated yet are waited for before an order is believed."""


class Steps:
    """Follows one process's updates; `framework` is the adapter, which stands above and is told."""

    def __init__(self, framework: Any) -> None:
        self._framework = framework
        self.rhythm = StepPeriod()
        self._known: MutableMapping[torch.optim.Optimizer, Known] = WeakIdKeyDictionary()  # which may have no hash
        self._before: UpdateHook | None = None
        self._after: UpdateHook | None = None
        self.coasts = False
        """Whether only ends of steps are told of, where no lever has to reach optimizers."""
        self._patches: list[Patch] = []
        self._backward_patch: Patch | None = None
        self.num_seen = 0
        """Updates."""
        self._num_begun = 0
        """Updates begun since the last one that was part of no other ended; those that raised count too."""
        self._has_pushed = False
        """Whether the phase of the update under way was begun here, because no patch of `step` did."""
        self._num_backwards = 0
        self._num_since_end = 0
        """Backward passes since a step ended without an update."""
        self._num_ended = 0
        """Steps that ended without an update."""
        self._limit = BACKWARDS_WITHOUT_UPDATE
        self._first_update_s: float | None = None
        self._first_backward_s: float | None = None
        self._ended_by: EndedBy = "optimizer"
        self._inference = Inference(framework)

    @property
    def ended_by(self) -> EndedBy:
        """What ends a step."""
        return "inference" if self._inference.begun else self._ended_by

    @property
    def num_missed(self) -> int:
        """Steps made before it was known what a step is.

        Without updates that show: by the backward passes that a step has taken since; the last one counts too, which
        nothing follows that would end it.
        """
        if self._inference.begun:
            return self._inference.num_missed
        since = self._num_backwards - self._limit
        if not self._num_ended or since <= 0:
            return self.rhythm.num_missed
        by_hand = round((self._limit - 1) * self._num_ended / since) + bool(self._num_since_end)
        return self.rhythm.num_missed + by_hand

    @property
    def since_s(self) -> float | None:
        """When the first update began, or, without any that shows, the first backward pass was over."""
        return self._first_backward_s if self._first_update_s is None else self._first_update_s

    def install(self) -> None:
        """Begin to follow; where calls of models are asked for, they alone."""
        self._inference.install()
        if self._framework.infers:
            return
        for hook in (Steps._before_update, Steps._after_update, nothing):
            leave_uncompiled(hook)
        self._before = UpdateHook(register_optimizer_step_pre_hook, self._before_update)
        self._after = UpdateHook(register_optimizer_step_post_hook, self._after_update)
        self._patches = [Patch(torch.amp.GradScaler, "step", self._watch_scaler)]
        self._backward_patch = Patch(torch.autograd, "backward", self._count_backward)

    def remove(self) -> None:
        """Leave nothing behind."""
        for hook in (self._before, self._after):
            if hook is not None:
                hook.remove()
        self._before = self._after = None
        remove_all(self._patches)
        self._stop_counting()
        self._known.clear()

    # -- updates -------------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        framework = self._framework
        if framework.session.silent:
            return None
        if self._first_update_s is None:
            self._begin()
        if get_ident() != framework.calls.thread:
            return None
        self._num_begun += 1
        if self.coasts and not framework.session.engaged:
            return None
        try:
            known = self.known_of(optimizer)
            if known.num_groups != len(optimizer.param_groups):
                known.num_groups = len(optimizer.param_groups)
                framework.meet(optimizer)
            framework.session.flags.before_update(optimizer)
            is_deep = framework.observer.is_deep
            if is_deep:
                framework.observer.meet(optimizer)
            elif not framework.capture.active:
                return None
            if self._num_begun > 1 and within_update(sys._getframe(1).f_back):
                return None
            if is_deep and framework.observer.clock.top != "optimizer":  # no patch of `step` has said so already
                framework.observer.push("optimizer")
                self._has_pushed = True
            return self._with_closure(optimizer, args, kwargs)
        except BaseException as problem:
            if framework.is_ours(problem):
                return None
            raise

    def known_of(self, optimizer: torch.optim.Optimizer) -> Known:
        """What is known of the optimizer; a new one takes the place of one that is gone."""
        known = self._known.get(optimizer)
        if known is None:
            taken = {one.place for one in self._known.values()}
            known = self._known[optimizer] = Known(next(place for place in count() if place not in taken))
        return known

    def _begin(self) -> None:
        """The first update of all: this thread is the one that trains."""
        self._first_update_s = perf_counter()
        self._framework.calls.thread = get_ident()
        self._stop_counting()
        self.rhythm.expect(num_optimizers())

    def _with_closure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Tell of the last update: now, or, where a closure is still to compute the gradients, after it.

        What a closure does is no part of the update.
        """
        framework, observer = self._framework, self._framework.observer
        is_deep = observer.is_deep
        last = framework.capture.active and self.rhythm.next_ends()
        if framework.capture.active:
            framework.capture.before_update(optimizer, last=last)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure) or not (last or is_deep):
            if last:
                self.tell_update()
            return None

        def observed(*args: Any, **kwargs: Any) -> Any:
            if is_deep:
                observer.push(BASE)
            try:
                result = closure(*args, **kwargs)
            except BaseException as problem:
                hide_ours(problem)
                raise
            finally:
                if is_deep:
                    observer.pop(BASE)
            if last:
                self.tell_update()  # again at each evaluation of the closure; only the first finds somebody waiting
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def tell_update(self) -> None:
        """Gradients are complete: whoever waits for that compares now."""
        framework = self._framework
        if framework.capture.complete and framework.listener is not None:
            framework.listener.on_update()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        framework = self._framework
        if framework.session.silent or get_ident() != framework.calls.thread:
            return
        try:
            self.num_seen += 1
            known = self.known_of(optimizer)
            framework.session.flags.after_update(optimizer)
            if self._num_begun > 1 and within_update(sys._getframe(1).f_back):
                return
            self._num_begun = 0
            if self._has_pushed:
                self._has_pushed = False
                framework.observer.pop("optimizer")
            if self.rhythm.waits and perf_counter() - (self._first_update_s or 0.0) > PATIENCE_S:
                self.rhythm.expect(0)
            if self.rhythm.update(known.place):
                framework.end_of_step()
        except BaseException as problem:
            if not framework.is_ours(problem):
                raise

    def _watch_scaler(self, original: Any, patch: Patch) -> Any:
        """A scaler that skips an update still ends a step."""

        @wraps(original)
        def step(scaler: Any, /, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.num_seen
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            except BaseException as problem:
                hide_ours(problem)
                raise
            if patch.active and scaler.is_enabled():
                self._framework.session.scaler_seen = True
                skipped = self.num_seen == before
                if skipped and isinstance(optimizer, torch.optim.Optimizer):
                    self._num_begun += 1
                    self._after_update(optimizer, (), {})
            return result

        return step

    # -- without updates -----------------------------------------------------------------------------------------

    def _count_backward(self, original: Any, patch: Patch) -> Any:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except BaseException as problem:
                hide_ours(problem)
                raise
            if patch.active and not torch.compiler.is_compiling():
                if not self._num_backwards:
                    self._first_backward_s = perf_counter()
                    self._inference.end()
                self._num_backwards += 1
                self._num_since_end += 1
                if self._num_backwards == self._limit:
                    self._miss_updates()
            return result

        return backward

    def _miss_updates(self) -> None:
        try:
            if self._limit == BACKWARDS_WITHOUT_UPDATE and num_optimizers():
                self._limit = BACKWARDS_OF_ONE_UPDATE
                return
            self._framework.calls.thread = get_ident()
            self._framework.loaders.on_fetch = lambda: self._ended("loader")
            self._framework.calls.on_training_call = lambda: self._ended("call")
            self._framework.look_for(with_gradients())
        except Exception as problem:  # noqa: BLE001
            self._framework.fail("recorder", problem)

    def _ended(self, by: EndedBy) -> None:
        """A batch is asked for, or the model called; if gradients were taken since the last time, a step is over."""
        framework = self._framework
        if not self._num_since_end or get_ident() != framework.calls.thread or framework.session.silent:
            return
        self._num_since_end = 0
        self._num_ended += 1
        self._ended_by = by
        try:
            framework.end_of_step()
        except Exception as problem:  # noqa: BLE001
            framework.fail("recorder", problem)

    def _stop_counting(self) -> None:
        self._ended_by = "optimizer"
        self._inference.end()
        self._framework.loaders.on_fetch = None
        self._framework.calls.on_training_call = None
        if self._backward_patch is not None:
            self._backward_patch.remove()
            self._backward_patch = None


@dataclass(slots=True)
class Known:
    """An optimizer that has updated: its number in the order of updates."""

    place: int
    num_groups: int = -1  # when it was met


def followed() -> bool:
    """Whether somebody follows this process's updates already."""
    hooks = getattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", {})
    return any(isinstance(getattr(hook, "__self__", None), Steps) for hook in hooks.values())
