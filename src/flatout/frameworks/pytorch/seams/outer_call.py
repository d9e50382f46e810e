"""One outermost call of a model: what computes it, and what is told of it.

A module's `_compiled_call_impl` (what `Module.compile` sets; copies and pickles leave it out) becomes an `OuterCall`,
which times the call, and which levers give other ways to compute. In: calls. Out: what the module would give.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data._utils import fetch

from flatout.frameworks.pytorch.seams.backward_threads import in_backward
from flatout.frameworks.pytorch.seams.gate import Gate
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.random_states import RandomStates, TorchStates
from flatout.frameworks.pytorch.seams.trees import tensors_of
from flatout.guest.tracebacks import hide_ours

Compute = Callable[..., Any]
Around = Callable[[Compute, tuple[Any, ...], dict[str, Any]], Any]

SEAM = "_compiled_call_impl"
_FETCH = fetch.__file__

NUM_GUARDED = 5
"""First calls under a set of levers before which all state is kept, so that one that raises leaves no trace. Before
later ones only PyTorch's generators are kept: copies of batch statistics, and of NumPy's generator (30 us), would cost
every step what one broken call is not worth."""


NUM_LOOKED_AT = 10
"""First training calls of which it is noted how the script makes them."""

FEWEST_JOINED = 2
"""Steps that called a model before it is believed to be a part of each step."""


class OuterCall:
    """The seam in one outermost module, which lives as long as the module and does not keep it alive.

    Levers set `compute` (another way to compute the same, e.g. compiled) and `arounds` (context and casts around it);
    both are used only where gradients are taken, or where the model is not trained and a part of each step. Evaluation
    is always computed as the script wrote it.
    """

    def __init__(self, module: nn.Module, owner: Any, name: str, *, trained: bool = True) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.trained = trained
        """Whether an optimizer has parameters of it."""
        self.in_each_step = False
        """Whether calls of which no gradients are taken belong to each step (targets, sampling, a teacher) instead of
        lying between steps."""
        self.in_step = True
        """Whether the latest call was a part of the step."""
        self.feeds_loader = False
        """Whether it is not trained, and a dataset calls it: then it is no model of the step."""
        self.compute: Compute | None = None
        self.arounds: dict[str, Around] = {}
        self.kept: dict[str, Any] = {}
        """What levers keep with this model, such as its compiled form; goes when the model goes."""
        self.num_calls = 0
        self.num_training_calls = 0
        self.calls_per_step = 1.0
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        """Shapes of the inputs of the first training calls."""
        self.autocast_seen = False
        """Whether the script made one of them under an autocast of its own."""
        self.plain_dtypes: tuple[torch.dtype, ...] | None = None
        """Types of the outputs as the script computes them; None before the first training call."""
        self.attention: tuple[str, ...] | None = None
        """Backends of attention in the graph of the first training call, where they are looked for."""
        self._num_guarded: dict[tuple[Any, ...], int] = {}
        self._num_before_step = 0
        self._joined = False
        """Whether the present step has called it without taking gradients."""
        self._num_joined = self._num_steps = 0
        """Steps that did, and all that were looked at."""
        self._modes: set[bool] = set()
        """Whether models that are trained were in training mode then."""
        self._owner = owner
        present = module.__dict__.get(SEAM)
        self._former: Compute | None = None if isinstance(present, OuterCall) else present
        self.compiled_by_script = self._former is not None or is_compiled(module)

    @property
    def module(self) -> nn.Module:
        """The module, which must still exist."""
        module = self._module()
        if module is None:
            raise ReferenceError(f"the model `{self.name}` is gone")
        return module

    @property
    def alive(self) -> bool:
        """Whether the module still exists."""
        return self._module() is not None

    @property
    def gate(self) -> Gate:
        """What calls pass as they begin and end."""
        return self._owner.gate  # type: ignore[no-any-return]

    @property
    def is_idle(self) -> bool:
        """Whether it is a part of a model, not trained, that was never called by itself."""
        return not self.trained and not self.num_calls and "." in self.name

    @property
    def phase(self) -> str:
        """What its latest call is in a step."""
        named = self.in_step and not (self.trained or self._owner.infers)
        return f"forward: {self.name}" if named else "forward"

    def install(self) -> None:
        """Become the module's call, on top of a compilation that the script has made, or taken back, since."""
        attributes = self.module.__dict__
        present = attributes.get(SEAM)
        if isinstance(present, OuterCall):
            return
        if present is not self._former:
            self._former, self.compiled_by_script = present, present is not None
        attributes[SEAM] = self

    def lift(self) -> None:
        """Where no lever computes its calls, let the module be called directly, until `install`."""
        if self.compute is None and not self.arounds and self._owner.divide is None:
            self.remove()

    def remove(self) -> None:
        """Give the module its own call back."""
        module = self._module()
        if module is None or module.__dict__.get(SEAM) is not self:
            return
        if self._former is None:
            del module.__dict__[SEAM]
        else:
            module.__dict__[SEAM] = self._former

    def __reduce__(self) -> tuple[Any, ...]:
        """A user's own pickling or copying of `__dict__` finds None in our place, and needs no flatout to load."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The script's own compiled call, or None."""
        return copy.deepcopy(self._former, memo)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as the script wrote it."""
        if self._former is not None:
            return self._former(*args, **kwargs)
        return self.module._call_impl(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: observed where it is the outermost, with the levers where gradients are taken."""
        if torch.compiler.is_compiling():  # a compilation of the script's own passes through here
            return self.plain(*args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")
        if caller is not self._module() and isinstance(caller, nn.Module):
            # a clone that was made by copying `__dict__` has our seam as well
            return (self._former or caller._call_impl)(*args, **kwargs)
        owner = self._owner
        if owner.inside or torch._C._get_tracing_state() is not None:
            return self.plain(*args, **kwargs)
        try:
            if owner.on_answer is not None:
                return self._answer(args, kwargs)
            if get_ident() == owner.thread:
                return self._outermost(args, kwargs)
        except BaseException as problem:
            hide_ours(problem)
            raise
        return self._recomputed(args, kwargs) if in_backward() else self.plain(*args, **kwargs)

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Until something trains, calls of any thread are followed; those that are kept are made one by one."""
        owner = self._owner
        owner.thread_counts.apply()
        owner.meet_thread()
        with owner.gate.apart() if owner.capture is not None else nullcontext():
            out = self._outermost(args, kwargs)
            with owner.gate:
                if owner.on_answer is not None and not self.module.training:
                    here = owner.here
                    owner.on_answer(self, here.took_s if here.epoch == owner.gate.epoch else None)
        return out

    def _outermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, gate = self._owner, self._owner.gate
        training = self.trained and torch.is_grad_enabled()
        if training and owner.on_training_call is not None:
            owner.on_training_call()
        with gate:
            gate.begin()
            owner.inside = True
            self.num_calls += 1
            self.in_step = training or self._belongs()
            observer = owner.training_observer if self.in_step else owner.observer
            if training:
                owner.has_trained = True
            else:
                self._joined |= not (self.trained and owner.has_trained)
            if observer is not None and gate.num_under_way == 1:
                observer.before_call(self, training)
            owner.here.epoch = gate.epoch
        begun_s = perf_counter()
        try:
            if training or not self.trained:
                return self._train(args, kwargs)
            if owner.evaluate is not None:
                return owner.evaluate(self, args, kwargs)
            return self.plain(*args, **kwargs)
        finally:
            owner.here.took_s = perf_counter() - begun_s  # what waits for its turn, before and after, waits for us
            with gate.lock:
                gate.end()
                owner.inside = False
                if observer is not None and not gate.num_under_way:
                    observer.after_call(self, training)

    def _recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call made again for its backward, in the thread of a device: as its forward was, and not counted."""
        owner = self._owner
        levers = (self.compute is not None or self.arounds) and self.in_step and torch.is_grad_enabled()
        if not levers or owner.divide is not None or owner.capture is not None:
            return self.plain(*args, **kwargs)
        owner.inside = True
        try:
            return self.with_levers(args, kwargs)
        finally:
            owner.inside = False

    def _belongs(self) -> bool:
        """Whether a call without gradients is a part of the step: as in the first ones, while nothing is evaluated.

        Where nothing is trained each is that is made in evaluation mode.
        """
        if self._owner.infers:
            return not self.module.training
        mode = any(call.module.training for call in self._owner.trained)
        if not self.in_each_step:
            self._modes.add(mode)
        return self.in_each_step and mode in self._modes

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self._owner
        self.num_training_calls += 1
        if self.num_training_calls < NUM_LOOKED_AT:
            self.autocast_seen = self.autocast_seen or torch.is_autocast_enabled(owner.device)
            self.feeds_loader |= not self.trained and within_fetch()
            self.shapes.add(_looked_into((args, kwargs), _shapes))
        if owner.divide is not None:
            return owner.divide(self, args, kwargs)
        if owner.capture is not None and self.in_step:
            return owner.capture(self, args, kwargs)
        if (self.compute is not None or self.arounds) and self.in_step:
            return self._guarded(args, kwargs)
        out = self.plain(*args, **kwargs)
        if self.plain_dtypes is None:
            self.plain_dtypes = _looked_into(out, _dtypes)
            if owner.look_at_graph is not None:
                self.attention = _looked_into(out, owner.look_at_graph)
        return out

    def with_levers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the call as the engaged levers say."""
        compute = self.compute or self.plain
        for around in tuple(self.arounds.values()):
            compute = partial(_called, around, compute)
        return compute(*args, **kwargs)

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call with levers; where they make it raise, they are released and the call is made as plain."""
        owner = self._owner
        if owner.on_broken is None:
            return self.with_levers(args, kwargs)
        levers = (self.compute is not None, *self.arounds)
        num = self._num_guarded.get(levers, 0)
        self._num_guarded[levers] = num + 1
        kept = self._keep(whole=num < NUM_GUARDED)
        try:
            return self.with_levers(args, kwargs)
        except Exception as problem:  # noqa: BLE001  perhaps the script's own: then plain raises it again below
            judge = owner.on_broken(problem)
        for state in kept:
            state.restore()
        try:
            out = self.plain(*args, **kwargs)
        except BaseException:
            judge(False)
            raise
        judge(True)
        return out

    def _keep(self, *, whole: bool) -> tuple[ModuleState | RandomStates | TorchStates, ...]:
        """What a call that breaks may have changed; `whole`: all of it, which costs a copy of the model's buffers."""
        try:
            return (ModuleState(self.module), RandomStates()) if whole else (TorchStates(),)
        except Exception:  # noqa: BLE001  (no memory left) then a call that breaks is made again on what it left
            return ()

    def end_step(self) -> None:
        """A step has ended: note how many calls it had."""
        self.calls_per_step = float(self.num_training_calls - self._num_before_step)
        self._num_before_step = self.num_training_calls
        self._num_steps += 1
        self._num_joined += self._joined
        self._joined = False

    def end_settling(self) -> None:
        """Steps enough were looked at: tell what belongs to each step from what lies between some.

        What was in each step stays so, where it is not trained: levers may be engaged in it.
        """
        often = self._num_joined >= FEWEST_JOINED and 2 * self._num_joined > self._num_steps
        self.in_each_step = often or (self.in_each_step and not self.trained)
        self._num_joined = self._num_steps = 0


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what `torch.compile` gives in the place of a module."""
    return type(module).__name__ == "OptimizedModule"


def _called(around: Around, inner: Compute, /, *args: Any, **kwargs: Any) -> Any:
    return around(inner, args, kwargs)


def _looked_into(value: Any, look: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    try:
        return look(value)
    except Exception:  # noqa: BLE001  a value of the script's own kind may raise anything when looked into
        return ()


def within_fetch() -> bool:
    """Whether a batch is being put together: then a dataset calls."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _FETCH:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _shapes(inputs: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in tensors_of(inputs, unique=False))


def _dtypes(out: Any) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in tensors_of(out, unique=False))
