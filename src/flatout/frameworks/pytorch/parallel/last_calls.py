"""Was the last call of each kind what the whole batch gives? So that no run ends well with calls that nobody confirmed.

They are computed both ways at the end, with the parameters of then, gradients by made-up ones of the outputs. In:
calls, and the end. Out: nothing, or a refusal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.cuts import entering
from flatout.frameworks.pytorch.parallel.group import Lost
from flatout.frameworks.pytorch.parallel.pattern import Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.trees import tensors_of

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.division import Division

MOST_KEPT = 4
"""Kinds of calls whose last one is kept; one more, and the oldest is confirmed at once."""


class LastCalls:
    """The calls of one module that came after the last confirmed one of their kind. It keeps the module alive."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._kept: dict[Any, tuple[Pattern, Any, Any, nn.Module, Callable[[], AbstractContextManager[Any]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, kind: Any, pattern: Pattern, args: Any, kwargs: Any, *, is_confirmed: bool) -> None:
        """A call is made."""
        self._kept.pop(kind, None)
        if is_confirmed:
            return
        module = self._division.module()
        if any(tensor.grad_fn is not None for tensor in tensors_of((args, kwargs))):  # of a graph nothing is kept
            args, kwargs, _ = entering(args, kwargs, itertools.repeat(lambda whole: whole))
        self._kept[kind] = pattern, args, kwargs, module, _autocast(next(module.parameters()).device.type)
        if len(self._kept) > MOST_KEPT:
            self._confirm(next(iter(self._kept)))

    def confirm(self) -> None:
        """Confirm those that are left.

        Raises:
            NotDivided: One of them is not what the whole batch gives.
        """
        while self._kept:
            self._confirm(next(iter(self._kept)))
        self._division.changes.forget()

    def _confirm(self, kind: Any) -> None:
        division = self._division
        pattern, args, kwargs, _module, autocast = self._kept.pop(kind)
        with ExitStack() as stack:
            for context in (division.apart(), division.changes.taken_back(), autocast()):
                stack.enter_context(context)
            try:
                division.held.renew()
                call, check = division.again(args, kwargs, pattern)
                pairs = zip(check.whole.outputs, pattern.taken or (), strict=False)
                gradients = [_made_up(out) if was and out.requires_grad else None for out, was in pairs]
                if any(one is not None for one in gradients):
                    call.compared(gradients)
            except (Lost, NotDivided):
                raise
            except Exception as problem:
                raise division.refused(
                    f"its last call cannot be made again to confirm it ({type(problem).__name__}: {problem})"
                ) from problem


def _made_up(output: torch.Tensor) -> torch.Tensor:
    """A gradient of an output, the same on all ranks, that nothing a model does to its outputs makes vanish."""
    waves = torch.arange(output.numel(), device=output.device, dtype=torch.float32).sin_()
    return waves.view(output.shape).to(output.dtype)


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled=enabled)
