"""Which calls are the models'?

The models that are trained are found from the optimizers: the modules that own their parameters and have no owner
themselves. All other such modules with parameters are models that are not trained: a teacher, a reference, a copy for
evaluation. Where nothing is trained, the models are those that the script was seen to call. Each becomes an
`OuterCall`. A module that training never calls hands over to its children. In: parameters. Out: the `OuterCall`s of the
models that training calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from threading import get_ident, local
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.seams.gate import Gate
from flatout.frameworks.pytorch.seams.outer_call import SEAM, OuterCall, is_compiled
from flatout.frameworks.pytorch.seams.owners import Owners, children, identities
from flatout.frameworks.pytorch.seams.thread_counts import ThreadCounts

MAX_DESCENT = 6
"""Levels of children looked through for the modules that training really calls."""

OnAnswer = Callable[[OuterCall, float | None], None]
"""Given a call that is over, and the seconds that it took; None where levers may have changed meanwhile."""


class _Here(local):
    inside = False
    took_s, epoch = 0.0, 0
    """Of this thread's latest call: its seconds, and the gate's epoch as it began."""


class Calls:
    """All outermost calls of a process."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        """The device on which models are trained."""
        self.gate = Gate()
        self.thread_counts = ThreadCounts()
        self.thread = get_ident()
        """The thread that trains; calls in others are left alone. Where nothing is trained the one that calls, -1 until
        one does, and 0 where several do."""
        self.here = _Here()
        self.observer: Any = None
        """Told of calls without gradients: of each its beginning, and its end also where it raised."""
        self.training_observer: Any = None
        """Told of calls of which gradients are taken."""
        self.has_trained = False
        """Whether there was such a call since somebody set this to False."""
        self.capture: Callable[[OuterCall, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.divide: Callable[[OuterCall, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Computes training calls where the run has many ranks."""
        self.evaluate: Callable[[OuterCall, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Computes other calls where ranks hold parts of parameters."""
        self.look_at_graph: Callable[[Any], tuple[str, ...]] | None = None
        """Told what a model's first training call returned."""
        self.on_training_call: Callable[[], None] | None = None
        """Told before each call of which gradients are taken, where calls are taken for steps."""
        self.on_answer: OnAnswer | None = None
        """Told after each call of a model in evaluation mode, until something trains; one that raises is none."""
        self.infers = False
        """Whether nothing is trained, so that such a call is a step, or a part of one."""
        self.on_broken: Callable[[Exception], Callable[[bool], None]] | None = None
        """Told when a call raised under levers; it must release them at once. What it returns is told whether the same
        call went well without them: then it was they that raised, else the script."""
        self._seams: list[OuterCall] = []
        self._owners = Owners()
        self._hides_seams = False
        self._wanted: set[int] = set()
        self._descents = 0

    @property
    def inside(self) -> bool:
        """Whether this thread is within an outermost call."""
        return self.here.inside

    @inside.setter
    def inside(self, inside: bool) -> None:
        self.here.inside = inside

    @property
    def device(self) -> str:
        """Its kind, `cuda` or `cpu`."""
        return self.where.type

    @device.setter
    def device(self, kind: str) -> None:
        self.where = torch.device(kind)

    @property
    def seams(self) -> list[OuterCall]:
        """All whose modules still exist."""
        if not all(call.alive for call in self._seams):
            self._seams = [call for call in self._seams if call.alive]
        return self._seams

    @property
    def trained(self) -> list[OuterCall]:
        """The models that are trained."""
        return [call for call in self.seams if call.trained]

    @property
    def found(self) -> list[OuterCall]:
        """What training calls: the models that are trained, and those of each step that are not; or all that infer."""
        return [call for call in self.seams if call.trained or call.in_each_step or self.infers]

    @property
    def num_training_calls(self) -> int:
        """Of models that are trained, so far."""
        return sum(call.num_training_calls for call in self.seams if call.trained)

    def look_for(self, parameters: Collection[torch.Tensor]) -> None:
        """Find the outermost modules that own these parameters, and those that own none; install their seam."""
        wanted = {id(p) for p in parameters}
        self._wanted |= wanted
        self._descents = 0
        for call in self.seams:
            call.trained = call.trained or not wanted.isdisjoint(identities(call.module))
        open_parameters = wanted.difference(*(identities(call.module) for call in self.trained))
        if open_parameters:
            owners, others = self._owners.of(open_parameters)
            self._add((type(module).__name__, module) for module in owners)
            if self.divide is None:
                self._add_untrained((type(module).__name__, module) for module in others)

    def follow(self, module: nn.Module, on_answer: OnAnswer) -> None:
        """Nothing is trained so far: follow the calls of this one, or of what is called in its place."""
        if self.on_answer is None:
            self.on_answer, self.thread = on_answer, -1
        found = [(type(module).__name__, module)]
        for name, part in [] if is_compiled(module) else found[:]:
            below = [(f"{name}.{inner}", child) for inner, child in children(part)]
            found += below
            found += [(f"{name}.{inner}", child) for name, part in below for inner, child in children(part)]
        self._add(((name, part) for name, part in found if identities(part)), trained=False)

    def meet_thread(self) -> None:
        """This thread calls, and nothing is trained."""
        if self.thread and self.thread != (own := get_ident()):
            self.thread = own if self.thread < 0 else 0

    def leave(self, module: nn.Module) -> None:
        """Follow neither this one nor its parts any more."""
        parts = {id(part) for part in module.modules()}
        self._drop([call for call in self.seams if id(call.module) in parts])

    def infer(self) -> None:
        """Nothing is trained, and what was called so far is what the script is about."""
        self.infers = True
        self._drop([call for call in self.seams if not call.num_calls])

    def train(self) -> None:
        """Something is trained: models are found from what is updated."""
        self.on_answer, self.infers = None, False
        self._drop([call for call in self.seams if not call.trained])

    def settle(self) -> bool:
        """After a step: replace modules that were not called by their children; True once none is left."""
        if self.divide is None and not self.infers:
            self._look_below()
        found = self.trained
        uncalled = [call for call in found if not call.num_training_calls]
        if not uncalled:
            return True
        if self._descents >= MAX_DESCENT:
            self._drop(uncalled)
            return True
        self._descents += 1
        called = (call for call in found if call.num_training_calls)
        open_parameters = self._wanted.difference(*(identities(call.module) for call in called))
        spare = [call for call in uncalled if open_parameters.isdisjoint(identities(call.module))]
        self._drop(spare)
        below = [(f"{call.name}.{name}", child) for call in uncalled for name, child in children(call.module)]
        self._add((name, child) for name, child in below if not open_parameters.isdisjoint(identities(child)))
        return len(spare) == len(uncalled)

    def _look_below(self) -> None:
        """Children that nobody trains of modules that were not called are looked at, too; an evaluation may call both.

        Those of a module that is called as a whole are a part of it.
        """
        parts = {id(part) for call in self.seams if call.num_calls for part in call.module.modules()}
        uncalled = [call for call in self.seams if id(call.module) not in parts]
        below = [(f"{call.name}.{name}", child) for call in uncalled for name, child in children(call.module)]
        self._add_untrained(below)
        self._drop([call for call in self.seams if call.is_idle and id(call.module) in parts])

    def end_settling(self) -> None:
        """All that training calls has been found; what is called between steps later is an evaluation."""
        if self.infers:
            return
        for call in self.seams:
            call.end_settling()
        kinds = {type(call.module) for call in self.trained}  # a copy within a wrapper is there to be evaluated
        idle = [call for call in self.seams if call.is_idle and type(call.module) not in kinds]
        self._drop([*idle, *(call for call in self.seams if call.feeds_loader)])

    def refresh(self) -> None:
        """Be in place again after `lift`, and where the script has compiled a module in place since."""
        for call in self.seams:
            call.install()

    def lift(self) -> None:
        """Be out of the way, but where levers compute calls, until `refresh`."""
        for call in self.seams:
            call.lift()

    def meet(self, module: nn.Module) -> None:
        """A module is about to be called as the outermost one."""
        self._add([(type(module).__name__, module)])

    def _add_untrained(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        owned = [(name, module, identities(module)) for name, module in named]
        self._add(
            ((name, module) for name, module, own in owned if own and self._wanted.isdisjoint(own)), trained=False
        )

    def _add(self, named: Iterable[tuple[str, nn.Module]], *, trained: bool = True) -> None:
        known = {id(call.module) for call in self.seams}
        for name, module in named:
            if id(module) not in known:
                known.add(id(module))
                call = OuterCall(module, self, name, trained=trained)
                module.__dict__[SEAM] = call
                self._seams.append(call)
        ignored = _ignored_by_script()
        if self._seams and SEAM not in ignored:
            ignored.append(SEAM)
            self._hides_seams = True

    def _drop(self, calls: list[OuterCall]) -> None:
        for call in calls:
            call.remove()
        self._seams = [call for call in self._seams if call not in calls]

    def remove(self) -> None:
        """Leave no seam behind."""
        self._drop(list(self._seams))
        if self._hides_seams and SEAM in _ignored_by_script():
            _ignored_by_script().remove(SEAM)
        self._hides_seams = False


def _ignored_by_script() -> list[str]:
    """Attributes of a module that `torch.jit.script` does not look at; our seam is one that it would refuse."""
    names = getattr(sys.modules.get("torch.jit._recursive"), "ignored_attributes", None)
    return names if isinstance(names, list) else []
