"""How is an attribute of somebody else's class or module replaced, and put back exactly?

A patch can be removed in any order: where another patch of ours lies on top of it, or one of the user's own, it stays
in the chain and merely passes calls on, and is taken out as soon as it comes to the top. In: a holder, a name and
what makes the replacement. Out: the attribute replaced until `remove`, and `patched`: all that is replaced now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patch:
    """One replaced attribute.

    `make` is given the original and the patch; the replacement it returns must behave like the original wherever
    `patch.active` is false.
    """

    def __init__(self, holder: Any, name: str, make: Callable[[Any, Patch], Any]) -> None:
        self.active = True
        self._holder = holder
        self._name = name
        self._own = name in vars(holder)
        self.original = vars(holder)[name] if self._own else getattr(holder, name)
        self.replacement = make(self.original, self)
        self.replacement.__dict__[_MARK] = self
        setattr(holder, name, self.replacement)
        _IN_PLACE.append(self)

    @property
    def name(self) -> str:
        """What is replaced, as in `Tensor.item`."""
        return f"{getattr(self._holder, '__name__', type(self._holder).__name__)}.{self._name}"

    def remove(self) -> None:
        """Give the attribute back, as far as nobody else has put something on top."""
        self.active = False
        patch: Patch | None = self
        while patch is not None and not patch.active:
            patch = patch._unwind()

    def _unwind(self) -> Patch | None:
        present = vars(self._holder).get(self._name)
        top = getattr(present, "__dict__", {}).get(_MARK)
        if not isinstance(top, Patch) or top.replacement is not present or top.active:
            return None  # somebody else's lies on top (a copy of our mark, made by `functools.wraps`, is not ours)
        _IN_PLACE.remove(top)
        if top._own:
            setattr(top._holder, top._name, top.original)
        else:
            delattr(top._holder, top._name)
        return getattr(top.original, "__dict__", {}).get(_MARK)


_MARK = "_flatout_patch"
_IN_PLACE: list[Patch] = []
"""All of this process, the earliest first; one that is off stays while somebody else's lies on top of it."""


def remove_all(patches: list[Patch]) -> None:
    """Take these away, the last first, and forget them."""
    while patches:
        patches.pop().remove()


def patched() -> list[str]:
    """What is replaced in this process at present, as in `torch.autograd.backward`, the earliest first."""
    return [patch.name for patch in _IN_PLACE if patch.active]
