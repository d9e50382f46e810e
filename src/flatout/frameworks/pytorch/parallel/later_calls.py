"""What can end a division's being right later? What the script changes, and the last call of each kind.

No run ends well with calls that nobody has confirmed. In: a module, after each call, and the end of training. Out:
whether something has changed between two calls, the same on all ranks, for all run the same script; the last calls
computed both ways, with the parameters of then, or a refusal.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.call_signature import SIMPLE
from flatout.frameworks.pytorch.parallel.cuts import entering
from flatout.frameworks.pytorch.parallel.group import Lost
from flatout.frameworks.pytorch.parallel.outside_state import OutsideState, copied_safely, is_same
from flatout.frameworks.pytorch.parallel.protocol import Dividing, Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.seams.module_state import INTERNAL

_WITHIN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
Kept = list[tuple[dict[Any, Any], dict[Any, Any]]]


class Changes:
    """What the script changes of one module between its calls."""

    def __init__(self) -> None:
        self._dicts: Kept = []
        self._values: list[tuple[Any, Any]] = []
        self._outside: OutsideState | None = None
        self._seen: list[Any] = []
        self._num_changes: Counter[Any] = Counter()

    def note(self, module: nn.Module) -> None:
        """A call is over: the next one should find what is there now."""
        if self._outside is None or not all(_is_equal(*pair) for pair in self._dicts):
            fields = [vars(part) for part in module.modules()]
            dicts = [live for own in fields for live in (own, *map(own.get, _WITHIN)) if isinstance(live, dict)]
            self._dicts = [(live, live.copy()) for live in dicts]
            found = {id(one): one for own in fields for name, one in own.items() if name not in INTERNAL}
            self._values = [(one, None) for one in found.values() if one is not None and type(one) not in SIMPLE]
        self._outside = self._outside or OutsideState(module)
        self._values = [(value, copied_safely(value)) for value, _ in self._values]
        self._seen = self._outside.seen()

    def look(self) -> bool:
        """Whether something has changed since then, for the 1st, 2nd, 4th, 8th ... time.

        What is changed before every call, as a temperature that falls, is no news for ever.
        """
        places: list[Any] = [
            (id(live), name)
            for live, before in self._dicts
            if not _is_equal(live, before)
            for name in {*live, *before} - INTERNAL
            if name not in live or name not in before or not _is_equal(live[name], before[name])
        ]
        places += [id(value) for value, before in self._values if not _is_one(before, copied_safely(value))]
        pairs = zip(self._seen, self._outside.seen() if self._outside is not None else (), strict=True)
        places += [place for place, pair in enumerate(pairs) if not _is_one(*pair)]
        self._num_changes.update(places)
        return any(self._num_changes[place] & (self._num_changes[place] - 1) == 0 for place in places)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Within, attributes, parameters, hooks and modules are those of the last call."""
        present = [(live, live.copy()) for live, _ in self._dicts]
        _put(self._dicts)
        try:
            yield
        finally:
            _put(present)


def _is_equal(found: Any, before: Any) -> bool:
    try:
        return found is before or bool(found == before)
    except Exception:  # noqa: BLE001  arrays, and objects that may raise whatever they are asked for
        return False


def _is_one(before: Any, after: Any) -> bool:
    return is_same(before, after) and is_same(after, before)


def _put(contents: Kept) -> None:
    for live, content in contents:
        if not _is_equal(live, content):
            live.clear()
            live.update(content)


MOST_KEPT = 4
"""Kinds of calls whose last one is kept; with one more the oldest is confirmed at once."""


class LastCalls:
    """The calls of a module that came after the last confirmed one of their kind. While there are any, it stays."""

    def __init__(self, division: Dividing) -> None:
        self._division = division
        self.kept: dict[Any, tuple[Any, ...]] = {}

    def keep(self, kind: Any, pattern: Pattern, args: Any, kwargs: Any, *, is_confirmed: bool) -> None:
        """A call is made."""
        self.kept.pop(kind, None)
        if not is_confirmed:
            module = self._division.module()
            device = next(module.parameters()).device.type
            autocast = torch.autocast(
                device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
            )
            args, kwargs, _ = entering(args, kwargs, itertools.repeat(lambda whole: whole))  # without their graphs
            self.kept[kind] = pattern, args, kwargs, autocast, module
        self.confirm(MOST_KEPT)

    def confirm(self, num_left: int = 0) -> None:
        """Confirm all but so many, the oldest first; or `NotDivided`."""
        while len(self.kept) > num_left:
            self._confirm(*self.kept.pop(next(iter(self.kept))))
        if not num_left:
            self._division.changes = Changes()

    def _confirm(self, pattern: Pattern, args: Any, kwargs: Any, autocast: AbstractContextManager[Any], _: Any) -> None:
        division = self._division
        try:
            with division.apart(), division.changes.taken_back(), autocast:
                division.held.renew()
                check = division.again(args, kwargs, pattern)
                pairs = zip(check.whole.outputs, pattern.taken or (), strict=False)
                division.compare_gradients(
                    check, [_made_up(out) if was and out.requires_grad else None for out, was in pairs]
                )
        except (Lost, NotDivided):
            raise
        except Exception as problem:
            cause = f"its last call cannot be made again to confirm it ({type(problem).__name__}: {problem})"
            raise division.refused(cause) from problem


def _made_up(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output; one like the output itself would vanish where that is normalised."""
    waves = torch.arange(output.numel(), device=output.device, dtype=torch.float32).sin_()
    return waves.view(output.shape).to(output.dtype)
