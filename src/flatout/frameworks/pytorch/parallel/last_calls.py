"""Was the last call of each kind what one process computes? No run ends well with calls that nobody has confirmed.

In: calls, and the end of training. Out: the last ones computed both ways, with the parameters of then; or a refusal.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from flatout.frameworks.pytorch.parallel.changes import Changes
from flatout.frameworks.pytorch.parallel.cuts import entering
from flatout.frameworks.pytorch.parallel.group import Lost
from flatout.frameworks.pytorch.parallel.pattern import Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.division import Division

MOST_KEPT = 4
"""Kinds of calls whose last one is kept; with one more the oldest is confirmed at once."""


class LastCalls:
    """The calls of a module that came after the last confirmed one of their kind. While there are any, it stays."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self.kept: dict[Any, tuple[Any, ...]] = {}

    def keep(self, kind: Any, pattern: Pattern, args: Any, kwargs: Any, *, is_confirmed: bool) -> None:
        """A call is made."""
        self.kept.pop(kind, None)
        if not is_confirmed:
            module = self._division.module()
            args, kwargs, _ = entering(args, kwargs, itertools.repeat(lambda whole: whole))  # without their graphs
            self.kept[kind] = pattern, args, kwargs, _autocast(next(module.parameters()).device.type), module
        while len(self.kept) > MOST_KEPT:
            self._confirm(*self.kept.pop(next(iter(self.kept))))

    def confirm(self) -> None:
        """Confirm those that are left.

        Raises:
            NotDivided: One of them is not what one process computes.
        """
        while self.kept:
            self._confirm(*self.kept.pop(next(iter(self.kept))))
        self._division.changes = Changes()

    def _confirm(self, pattern: Pattern, args: Any, kwargs: Any, autocast: AbstractContextManager[Any], _: Any) -> None:
        division = self._division
        try:
            with division.apart(), division.changes.taken_back(), autocast:
                division.held.renew()
                call, outputs = division.again(args, kwargs, pattern)
                pairs = zip(outputs, pattern.taken or (), strict=False)
                call.compared([_made_up(out) if was and out.requires_grad else None for out, was in pairs])
        except (Lost, NotDivided):
            raise
        except Exception as problem:
            cause = f"its last call cannot be made again to confirm it ({type(problem).__name__}: {problem})"
            raise division.refused(cause) from problem


def _made_up(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output; one like the output itself would vanish where that is normalised."""
    waves = torch.arange(output.numel(), device=output.device, dtype=torch.float32).sin_()
    return waves.view(output.shape).to(output.dtype)


def _autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
