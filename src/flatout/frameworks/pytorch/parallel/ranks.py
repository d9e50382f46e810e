"""How does this process become one rank of many? It joins the others, finds the models that are called, divides calls.

In: which rank this is, and the calls of the process. Out: divided calls from the first training call on, or the end of
the run where they cannot be divided, before anything was trained.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from flatout.frameworks.pytorch.calls import Calls, OuterCall
from flatout.frameworks.pytorch.parallel import equality
from flatout.frameworks.pytorch.parallel.division import Division
from flatout.frameworks.pytorch.parallel.gradients import have_warned
from flatout.frameworks.pytorch.parallel.group import Group, Lost
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.patches import Patch
from flatout.ranks import EXIT_LOST, RankPlace, Terms, ended_file, leave, refuse

WAIT_FOR_CULPRIT_S = 5.0
"""So long a rank whose exchange broke waits to hear that another one has ended, before it says so itself."""


class Ranks:
    """This process as one of the ranks."""

    def __init__(self, me: RankPlace, terms: Terms, calls: Calls) -> None:
        self._terms, self._calls = terms, calls
        _share_cores(me.local_world)
        self.group = Group(me, limit_s=terms.hang_timeout_s)
        self.group.on_lost = self._lost
        self._patch: Patch | None = None
        self._same_start()

    # -- start ---------------------------------------------------------------------------------------------------

    def _same_start(self) -> None:
        """Numbers that nobody has seeded are drawn from the system: let them be those of rank 0."""
        states = self.group.objects(equality.generators() if self.group.rank == 0 else None, "random numbers")
        if self.group.rank:
            equality.set_generators(states[0])

    def begin(self) -> None:
        """Divide calls from here on."""
        have_warned(self.group)
        self._calls.divide = self._divide
        self.watch()

    def watch(self) -> None:
        """Look for modules that are called; `rest` ends it."""
        if self._patch is None:
            self._patch = Patch(nn.Module, "__call__", self._seen)

    def rest(self) -> None:
        """All that training calls has been found."""
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.remove()

    def _seen(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        calls = self._calls

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            wanted = patch.active and not calls.inside and torch.is_grad_enabled()
            if wanted and not torch.compiler.is_compiling() and any(p.requires_grad for p in module.parameters()):
                calls.meet(module)
            return original(module, *args, **kwargs)

        return __call__

    # -- calls ---------------------------------------------------------------------------------------------------

    def _divide(self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        division = call.kept.get("division")
        if division is None:
            division = Division(call.name, lambda: call.module, _computing(call), self.group, self._refuse)
            call.kept["division"] = division
        return division(args, kwargs)

    def remarks(self) -> list[str]:
        """What is to be said in the end."""
        divisions = [call.kept["division"] for call in self._calls.found if "division" in call.kept]
        return [text for division in divisions for text in division.remarks]

    # -- ends ----------------------------------------------------------------------------------------------------

    def _refuse(self, problem: NotDivided) -> NoReturn:
        """End the run: nothing has been trained yet, and it could only be trained wrongly."""
        refuse(self._terms, self.group.rank, problem.error, cause=problem.cause, hint=problem.hint)

    def _lost(self, problem: Lost) -> None:
        """An exchange broke, most often because another rank has ended: then that one tells why."""
        place = Path(self._terms.folder)
        until_s = time.monotonic() + WAIT_FOR_CULPRIT_S
        while time.monotonic() < until_s:
            if any(_has_failed(ended_file(place, r)) for r in range(self.group.world) if r != self.group.rank):
                leave(EXIT_LOST)
            time.sleep(0.05)


def _has_failed(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["code"] not in (0, EXIT_LOST)
    except (OSError, ValueError, KeyError):
        return False


def _computing(call: OuterCall) -> Callable[..., Any]:
    return lambda *args, **kwargs: call.with_levers(args, kwargs)


def _share_cores(num_processes: int) -> None:
    """Give each rank of this machine its share of the cores, unless the user has said how many threads there are."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(min(torch.get_num_threads(), cores // num_processes), 1))
