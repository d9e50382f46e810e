"""How does a rank compute its stage of a call, and nothing else of it?

It runs the model's own `forward`. Calls of modules that came before return placeholders, tensors of the right shapes
without a number in them; the stage's first call gets what was received; the `forward` is left where the next stage's
first call is about to be made. In: what is done at each call. Out: what was returned, or what the next stage is given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.frameworks.pytorch.parallel.call_signature import skeleton
from flatout.frameworks.pytorch.parallel.cuts import Tensors
from flatout.frameworks.pytorch.parallel.module_calls import Timeline, intercepted, plainly, without_fast_path
from flatout.frameworks.pytorch.parallel.stand_ins import Swaps
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

Shapes = Mapping[tuple[int, str], torch.Size]


def shapes_of(module: nn.Module) -> Shapes:
    """Shapes of whole parameters, by the identity of their module and their name in it."""
    return {
        (id(part), name): p.shape
        for part in module.modules() for name, p in part._parameters.items() if p is not None
    }  # fmt: skip


class Placeholders:
    """What modules would return, by the shapes of parameters: this rank may have none of their memory."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._known: dict[Any, Any] = {}

    def of(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a call returns; it raises what the module raises that looks at numbers."""
        given = tensors_of((args, kwargs), unique=False)
        shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in given)
        key = (id(module), module.training, skeleton((args, kwargs)), shapes)
        if key not in self._known:
            self._known[key] = self._found(module, args, kwargs)
        return map_tensors(_nothing, self._known[key])

    def _found(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes 0.5 s to load

        whole = {
            id(p): (self._shapes[id(part), name], p)
            for part in module.modules() for name, p in part._parameters.items() if p is not None
        }  # fmt: skip
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = {one: torch.empty(shape, dtype=p.dtype, device=p.device) for one, (shape, p) in whole.items()}
            args, kwargs = map_tensors(mode.from_tensor, (args, kwargs))
            kept = ModuleState(module)
            try:
                with Swaps(module, fake).made():
                    return module._call_impl(*args, **kwargs)
            finally:
                kept.restore()


def _nothing(shape: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(shape, FakeTensor):  # a constant of the module's own
        return shape
    if shape.is_floating_point():  # so that what reads it shows, also what multiplies it by zero
        return torch.full(shape.shape, math.nan, dtype=shape.dtype, device=shape.device)
    return torch.zeros(shape.shape, dtype=shape.dtype, device=shape.device)


Action = Literal["skip", "enter", "make", "give", "leave"]
"""At a call: return placeholders; receive its inputs and make it; make it; make it with what was received in the place
of placeholders; send its inputs."""


@dataclass(slots=True)
class StagePlan:
    """What one rank does between the call with which it begins and that of the next stage; None: the model's own."""

    begin: int | None
    end: int | None
    actions: dict[int, list[Action]] = field(default_factory=dict)
    """For each module, by identity, what is done at its calls, in their order."""
    modules: dict[int, nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline, begin: int | None, end: int | None) -> StagePlan:
        """What is done between two calls."""
        plan, start = cls(begin, end), -1 if begin is None else begin
        passed = set() if begin is None else set(map(id, timeline.tensors_at(begin)))
        for call in timeline.calls[: None if end is None else end + 1]:
            if any(timeline.calls[outer].end <= start for outer in call.outer):
                continue  # within a call that is not made
            action: Action = "make"
            if call.begin == end:
                action = "leave"
            elif call.end <= start:
                action = "skip"
            elif call.begin == start:
                action = "enter"
            elif call.begin > start and passed.intersection(map(id, timeline.tensors_at(call.begin))):
                action = "give"
            plan.actions.setdefault(id(call.module), []).append(action)
            plan.modules[id(call.module)] = call.module
        return plan

    def needs(self, timeline: Timeline, time: int, outer: Sequence[int]) -> bool:
        """Whether this rank computes what was computed then, within those calls."""
        if self.end is not None and time > self.end:
            return False
        if self.begin is None or time > self.begin:
            return True
        return all(timeline.calls[one].end > self.begin for one in outer)


class _Leaving(BaseException):
    """The next stage's first call is about to be made. A script's `except Exception` does not stop it."""

    def __init__(self, given: tuple[Any, Any]) -> None:
        super().__init__()
        self.given = given


class AnotherWay(RuntimeError):
    """A call takes another way through its modules than the one that was divided."""


@dataclass(slots=True)
class Computation:
    """One computation of a stage, on one micro-batch: what the model returned, or the next stage is to be given."""

    receive: Callable[[list[torch.Tensor]], Tensors]
    """Asked once, at the stage's first call: what comes in the place of placeholders."""
    value: Any = None
    given: list[torch.Tensor] | None = None
    num_calls: Counter[int] = field(default_factory=Counter)
    _received: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _first: Tensors = ()

    def enter(self, given: tuple[Any, Any]) -> Any:
        """The first call's arguments with what was received."""
        placeholders = tensors_of(given, unique=False)
        received = self.receive(placeholders)
        if len(received) != len(placeholders):
            raise AnotherWay(f"{len(received)} tensors came for a call with {len(placeholders)}")
        self._first = received
        pairs = zip(placeholders, received, strict=True)
        self._received.update({id(placeholder): (placeholder, one) for placeholder, one in pairs})
        return self.with_received(given)

    def enter_again(self, given: tuple[Any, Any]) -> Any:
        """The same, where it is computed once more."""
        first = iter(self._first)
        return map_tensors(lambda _: next(first), given, unique=False)

    def with_received(self, given: Any) -> Any:
        """Arguments, or what is returned, with what was received in the place of placeholders."""
        return map_tensors(lambda t: self._received[id(t)][1] if id(t) in self._received else t, given, unique=False)

    @property
    def has_entered(self) -> bool:
        """Whether its first call was made."""
        return bool(self._received)


class _Giving(TorchFunctionMode):
    """Functions that the model calls by itself (a sum past a layer) get what was received, too."""

    def __init__(self, computation: Computation) -> None:
        super().__init__()
        self._computation = computation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with what was received."""
        kwargs = kwargs or {}
        if self._computation.has_entered:
            args, kwargs = self._computation.with_received((args, kwargs))
        return func(*args, **kwargs)


class Stage:
    """What one rank computes of a module's calls."""

    def __init__(self, plan: StagePlan, placeholders: Placeholders) -> None:
        self.plan, self._placeholders = plan, placeholders
        self._current: Computation | None = None
        self._again: Computation | None = None

    def compute(self, computation: Computation, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Compute the stage of one call; or `AnotherWay`."""
        self._current = computation
        try:
            with _Giving(computation):
                computation.value = computation.with_received(compute(*args, **kwargs))
        except _Leaving as leaving:
            computation.given = tensors_of(leaving.given, unique=False)
        else:
            if self.plan.end is not None:
                raise AnotherWay("it returns before it comes to the next stage")
        finally:
            self._current = None
        if self.plan.begin is not None and not computation.has_entered:
            raise AnotherWay("it does not come to where its stage begins")

    @contextmanager
    def again(self, computation: Computation) -> Iterator[None]:
        """Within, modules that are called compute anew what they have computed (checkpoints)."""
        self._again = computation
        try:
            with _Giving(computation):
                yield
        finally:
            self._again = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, modules are called as `compute` and `again` say."""
        with without_fast_path(), intercepted((one, self._through(one)) for one in self.plan.modules.values()):
            yield

    def _through(self, module: nn.Module) -> Callable[..., Any]:
        actions = self.plan.actions[id(module)]

        def called(*args: Any, **kwargs: Any) -> Any:
            given = args, kwargs
            now, again = self._current, self._again
            if now is None:
                return plainly(module, *given) if again is None else self._called_again(again, module, given)
            now.num_calls[id(module)] += 1
            num = now.num_calls[id(module)]
            if num > len(actions):
                raise AnotherWay(f"`{type(module).__name__}` is called {num} times, and {len(actions)} before")
            action = actions[num - 1]
            if action == "leave":
                raise _Leaving(now.with_received(given))  # what is passed along may come from stages before
            if action == "skip":
                return self._placeholder(module, given)
            if action == "enter":
                args, kwargs = now.enter(given)
            elif action == "give":
                args, kwargs = now.with_received(given)
            return plainly(module, args, kwargs)

        return called

    def _placeholder(self, module: nn.Module, given: tuple[Any, Any]) -> Any:
        """What a call would return; what is called within it counts for nothing."""
        kept = self._current, self._again
        self._current = self._again = None
        try:
            return self._placeholders.of(module, *given)
        finally:
            self._current, self._again = kept

    def _called_again(self, again: Computation, module: nn.Module, given: tuple[Any, Any]) -> Any:
        """A call within a checkpoint, which may have begun before the stage does."""
        actions = set(self.plan.actions[id(module)])
        if actions == {"skip"}:
            return self._placeholder(module, given)
        args, kwargs = again.enter_again(given) if actions == {"enter"} else again.with_received(given)
        return plainly(module, args, kwargs)
