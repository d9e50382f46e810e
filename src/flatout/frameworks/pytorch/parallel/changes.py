"""What of a module does a script change between two calls of it?

Attributes of the module and of all within it, with what is in containers and plain objects among them; hooks; modules
that are taken in or out; variables outside that its code names. What changes within a call is the call's own doing,
and may differ from rank to rank: it is not looked at. In: a module. Out: whether something has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from flatout.frameworks.pytorch.module_state import INTERNAL
from flatout.frameworks.pytorch.parallel.outside_state import OutsideState, copied_safely, is_foreign, is_same

_WITHIN = ("_modules", "_forward_hooks", "_forward_pre_hooks")
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), nn.Module)


class Changes:
    """Looks at a module whenever it is about to be called; the same on all ranks, for all run the same script.

    Args:
        module: Gives the module.
    """

    def __init__(self, module: Callable[[], nn.Module]) -> None:
        self._module, self._num_changes = module, Counter[Any]()
        self.forget()

    def forget(self) -> None:
        """Hold on to nothing of the module's."""
        self._parts: list[_Part] = []
        self._inner: list[tuple[Any, Any, Any]] = []
        self._outside: OutsideState | None = None
        self._seen: list[Any] = []

    def note(self) -> None:
        """A call is over: the next one should find what is there now."""
        if self._outside is None or any(part.has_other_modules() for part in self._parts):
            self._parts = [_Part(name, part) for name, part in self._module().named_modules()]
            self._outside = OutsideState(self._module())
        for part in self._parts:
            part.note()
        inner = {id(value): (place, value) for part in self._parts for place, value in part.inner}
        self._inner = [(place, value, copied_safely(value)) for place, value in inner.values()]
        self._seen = self._outside.seen()

    def look(self) -> bool:
        """Whether something has changed since then, for the 1st, 2nd, 4th, 8th ... time.

        What a script changes before every call, as a temperature that it lets fall, is no news for ever.
        """
        places = [place for part in self._parts for place in part.changed()]
        places += [place for place, value, before in self._inner if not _is_one(before, copied_safely(value))]
        pairs = zip(self._seen, self._outside.seen() if self._outside is not None else (), strict=True)
        places += [number for number, pair in enumerate(pairs) if not _is_one(*pair)]
        self._num_changes.update(places)
        return any(self._num_changes[place] & (self._num_changes[place] - 1) == 0 for place in places)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Within, attributes, hooks and modules are those of the last call."""
        present = [(live, live.copy()) for part in self._parts for live, _ in part.kept]
        _put(pair for part in self._parts for pair in part.kept)
        try:
            yield
        finally:
            _put(present)


class _Part:
    """One module, and what its attributes were."""

    def __init__(self, name: str, part: nn.Module) -> None:
        self._name, self._fields = name, vars(part)
        inner = [self._fields.get(one) for one in _WITHIN]
        self.kept = [(live, live.copy()) for live in (self._fields, *inner) if isinstance(live, dict)]
        self._is_foreign = is_foreign(type(part).__module__)
        self.inner: list[tuple[Any, Any]] = self._found()

    def note(self) -> None:
        if not all(_is_equal(*pair) for pair in self.kept):
            self.kept = [(live, live.copy()) for live, _ in self.kept]
            self.inner = self._found()

    def _found(self) -> list[tuple[Any, Any]]:
        """Containers and objects among the attributes; PyTorch's own modules have none that is changed."""
        fields = () if self._is_foreign else self._fields.items()
        return [
            ((self._name, name), value)
            for name, value in fields
            if name not in INTERNAL and not isinstance(value, _SIMPLE)
        ]

    def has_other_modules(self) -> bool:
        return any(live is self._fields.get("_modules") and not _is_equal(live, before) for live, before in self.kept)

    def changed(self) -> list[Any]:
        """The places that are not what they were."""
        return [
            (self._name, number, name)
            for number, (live, before) in enumerate(self.kept)
            if not _is_equal(live, before)
            for name in {*live, *before} - (set() if number else INTERNAL)
            if name not in live or name not in before or not _is_equal([live[name]], [before[name]])
        ]


def _is_equal(found: Any, before: Any) -> bool:
    """Whether both hold the same objects, or equal ones."""
    try:
        return bool(found == before)
    except Exception:  # noqa: BLE001  arrays, and objects that may raise whatever they are asked for
        return False


def _is_one(before: Any, after: Any) -> bool:
    return is_same(before, after) and is_same(after, before)


def _put(pairs: Any) -> None:
    for live, content in pairs:
        if not _is_equal(live, content):
            live.clear()
            live.update(content)
