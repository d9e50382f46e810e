"""How are ends of steps followed at the least cost, while nobody asks what steps consist of and changes nothing?

The end of each step is told of, and what engaged levers do in an update and after a step is done. In: updates. Out:
ends of steps. Used while step ends alone are observed, between two looks of a run at its plan, and in a run without.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flatout.frameworks.pytorch.seams.update_hooks import within_update

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.steps import Followed, Steps


class Coasting:
    """The hooks while a process coasts."""

    def __init__(self, framework: Followed, steps: Steps) -> None:
        self._framework = framework
        self._steps = steps
        self._only: Callable[[], torch.optim.Optimizer | None] = _nobody
        """The optimizer each of whose updates ends a step, where there is but one."""
        self._num_groups = 0
        """Its parameter groups."""

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An update begins."""
        framework = self._framework
        if get_ident() == framework.calls.thread:
            framework.session.flags.before_update(optimizer)

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An update is over."""
        framework = self._framework
        if get_ident() != framework.calls.thread:
            return
        try:
            framework.session.flags.after_update()
            if optimizer is self._only() and len(optimizer.param_groups) == self._num_groups:
                self._steps.num_seen += 1
            elif not self._ends_step(optimizer):
                return
            framework.end_of_step()
        except BaseException as problem:
            if not framework.is_ours(problem):
                raise

    def _ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """The same for whichever optimizer, by what is known of it and of the order of updates."""
        steps, framework = self._steps, self._framework
        self._only = _nobody
        known = steps.known_of(optimizer)
        if within_update(sys._getframe(2).f_back):
            steps.note_part(known)
            return False
        steps.num_seen += 1
        if known.num_groups != len(optimizer.param_groups) and framework.session.engaged:
            known.num_groups = len(optimizer.param_groups)
            framework.meet(optimizer)  # levers are extended to it, for which all is followed again
        ends = steps.rhythm.update(known.place)
        if steps.rhythm.is_every_update and not steps.has_parts:
            self._only, self._num_groups = weakref.ref(optimizer), len(optimizer.param_groups)
        return ends


def _nobody() -> None:
    return None
