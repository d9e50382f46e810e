"""What is a call given, and does it change any of that, or give it on?

Some functions of libraries write into an operand if they are told to, and some give the memory of what they were given
where they would copy it otherwise. In: a function, or the name of a method, and operands. Out: whether that does harm.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.harmless.resolving import Refused
from flatout.frameworks.pytorch.input.harmless.values import Value
from flatout.frameworks.pytorch.seams.patches import original_of


@dataclass(frozen=True, slots=True)
class Operands:
    """What a call is given.

    Attributes:
        values: By place.
        named: By name.
        open: Whether there may be more of either.
    """

    values: list[Value]
    named: dict[str, Value]
    open: bool = False

    def all(self) -> list[Value]:
        """All of them."""
        return [*self.values, *self.named.values()]


_METHODS_WITH_OUT = {
    **dict.fromkeys(("clip", "sum", "prod", "mean", "std", "var", "cumsum", "cumprod"), 2),
    **dict.fromkeys(("min", "max", "argmin", "argmax", "dot", "round", "any", "all"), 1),
}
"""Methods of arrays, with the first place of an operand that is written to."""

_PLACE_OF_COPY = {"astype": 4}
"""Methods that copy unless an operand says that they need not."""


def check_keywords(text: str, operands: Operands) -> None:
    """Operands by name that change what a call does.

    Raises:
        Refused: It may do harm.
    """
    for name in ("generator", "rng", "random_state"):
        if name in operands.named and operands.named[name].sole() is not None:
            raise Refused(f"`{text}` draws from a generator of the script's own")
    in_place = [operands.named[name].sole() for name in ("out", "inplace", "in_place") if name in operands.named]
    wanted = [thing for thing in in_place if thing is not None and thing is not False]
    if wanted and not all(value.own for value in operands.all()):
        raise Refused(f"`{text}` changes something that is not the item's own")


def check_places(function: Any, text: str, operands: Operands) -> None:
    """Operands by place into which a function writes, or that tell it to write into its first one.

    Raises:
        Refused: It may do harm.
    """
    first = _place_of_out(function)
    written = operands.values[first:] if first is not None else []
    if first is not None and operands.open:
        written = operands.values
    if function is torch.nn.functional.relu and len(operands.values) > 1:
        written = operands.values
    if function is original_of(np.nan_to_num) and (len(operands.values) > 1 or "copy" in operands.named):
        written = operands.all()
    if not all(value.own for value in written):
        raise Refused(f"`{text}` changes something that is not the item's own")


def check_method(name: str, operands: Operands) -> None:
    """The same for a method.

    Raises:
        Refused: It may do harm.
    """
    first = 0 if operands.open else _METHODS_WITH_OUT.get(name)
    if name in _METHODS_WITH_OUT and not all(value.own for value in operands.values[first:]):
        raise Refused(f"`.{name}()` may change something that is not the item's own")


def may_share(name: str, operands: Operands) -> bool:
    """Whether a function or method that copies by default is told that it need not."""
    if "copy" in operands.named:
        return operands.named["copy"].sole() is not True
    return name in _PLACE_OF_COPY and (operands.open or len(operands.values) > _PLACE_OF_COPY[name])


@lru_cache(maxsize=512)
def _place_of_out(function: Any) -> int | None:
    """The place of NumPy's operand into which a result is written; None where there is none."""
    if isinstance(function, np.ufunc):
        return function.nin
    if not (getattr(function, "__module__", None) or "").startswith("numpy"):
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("out") if "out" in names else None
