"""What may an expression of the script's code be, as far as that shows without running it?

In: what is known of the parts. Out: a `Value`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_AMONG = 64
"""Objects that a value can be, beyond which it is not known."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What an expression may be.

    Attributes:
        among: The objects of which it is one; None where they are not known.
        own: Whether it was made while the item was made, or can never change: changing it harms nobody.
        parts: What a tuple was made of.
        each: What each of its elements may be; None where they are as little known as itself.
        kinds: The classes of which it is; None where they are not known.
    """

    among: tuple[Any, ...] | None = None
    own: bool = False
    parts: tuple[Value, ...] | None = None
    each: Value | None = None
    kinds: frozenset[type] | None = None

    def element(self) -> Value:
        """What one of its elements may be."""
        if self.each is not None:
            return self.each
        return joined(self.parts) if self.parts else Value(own=self.own)

    def sole(self) -> Any:
        """The one object that it is; `UNKNOWN` where it may be several, or is not known."""
        return self.among[0] if self.among is not None and len(self.among) == 1 else UNKNOWN


UNKNOWN = object()
OWN = Value(own=True)
SHARED = Value()


def known(thing: Any, *, own: bool = False) -> Value:
    """The value that is one object at all times."""
    return Value((thing,), own or isinstance(thing, IMMUTABLE))


IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), range, type(Ellipsis), slice, frozenset)
"""Classes whose objects never change."""


def either(one: Value, other: Value) -> Value:
    """What is one of two values."""
    if one is other:
        return one
    among: tuple[Any, ...] | None = None
    if one.among is not None and other.among is not None:
        new = tuple(thing for thing in other.among if not any(thing is seen for seen in one.among))
        among = one.among + new if len(one.among) + len(new) <= MOST_AMONG else None
    parts = None
    if one.parts is not None and other.parts is not None and len(one.parts) == len(other.parts):
        parts = tuple(either(a, b) for a, b in zip(one.parts, other.parts, strict=True))
    each = None
    if one.each is not None or other.each is not None or (parts is None and (one.parts or other.parts)):
        each = either(one.element(), other.element())
    kinds = one.kinds | other.kinds if one.kinds is not None and other.kinds is not None else None
    return Value(among, one.own and other.own, parts, each, kinds)


def joined(values: tuple[Value, ...] | list[Value]) -> Value:
    """What is one of several values; at least one is given."""
    found = values[0]
    for value in values[1:]:
        found = either(found, value)
    return found


def same(one: Value | None, other: Value | None) -> bool:
    """Whether two values say the same."""
    if one is None or other is None or one is other:
        return one is other
    if (one.own, one.kinds) != (other.own, other.kinds):
        return False
    if not _all(lambda a, b: a is b, one.among, other.among) or not _all(same, one.parts, other.parts):
        return False
    return same(one.each, other.each)


def _all(alike: Callable[[Any, Any], bool], ones: tuple[Any, ...] | None, others: tuple[Any, ...] | None) -> bool:
    if ones is None or others is None:
        return ones is others
    return len(ones) == len(others) and all(alike(a, b) for a, b in zip(ones, others, strict=True))
