"""How a record becomes JSON and comes back.

Records are frozen, slotted, keyword-only dataclasses; their JSON is derived from their fields, so that it is
written down once. In: a record or a JSON object. Out: the other one, or a `RecordError` that names the field.

JSON has no NaN and no infinity, and browsers and `jq` refuse Python's spelling of them: NaN is written as `null`, the
infinities as `"Infinity"` and `"-Infinity"`. A `float` field reads all three back; a `float | None` field reads a NaN
back as None, for both say that the number is not known.

What a script makes goes into records as it is: a size may be an integer of NumPy, a rate a tensor. It becomes the plain
number or text that it stands for here, and nowhere else.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from flatout.errors import RecordError

R = TypeVar("R")

_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = {number: word for word, number in _INFINITIES.items()}


def to_json(value: Any) -> Any:
    """The plain JSON value (dict, list, str, finite number, bool, None) of a record.

    >>> @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    ... class Point:
    ...     x_s: float
    ...     name: str | None = None
    >>> to_json(Point(x_s=0.5))
    {'x_s': 0.5, 'name': None}
    >>> to_json([float("nan"), float("-inf")])
    [None, '-Infinity']

    Raises:
        TypeError: A value stands for nothing of the kind; its place is named.
    """
    try:
        return _json(value)
    except _Misfit as problem:
        raise TypeError(problem.error(type(value).__name__).error) from None


def _json(value: Any) -> Any:
    if value is None or type(value) in (str, bool, int):
        return value
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else None if math.isnan(value) else _WORDS[value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _at(f.name, _json, getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _at(str(name), _json, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return _json(_plain(value))


def _plain(value: Any) -> Any:
    """The number, text or member's value that a value stands for: of NumPy, PyTorch, or a class of the script's own."""
    try:
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, str | os.PathLike):
            return str.__str__(value) if isinstance(value, str) else os.fsdecode(value)
        if isinstance(value, numbers.Integral) or not hasattr(value, "item"):
            return int(value) if hasattr(value, "__index__") else float(value)
        found = float(value) if isinstance(value, numbers.Real) else value.item()
        if type(found) in (bool, int, float, str):
            return found
    except Exception:  # noqa: BLE001  what a script's own class does when it is asked is its own
        pass
    raise _Misfit(f"{type(value).__module__}.{type(value).__qualname__}", "a plain number or text")


def from_json(kind: type[R], value: Any, *, where: str = "record") -> R:
    """The record of type `kind` that `value` describes; unknown fields are ignored, so that old readers read on.

    Args:
        kind: A record class.
        value: What `json.loads` returned.
        where: Named in the error, e.g. the file and line.

    Raises:
        RecordError: A field is missing or has another type.
    """
    try:
        return typing.cast(R, _record(kind, value))
    except _Misfit as problem:
        raise problem.error(where) from None


class _Misfit(Exception):
    """A value that is not what its field holds, or a field that is not there (`missing`)."""

    def __init__(self, value: Any, wanted: str, *, missing: bool = False) -> None:
        super().__init__()
        self.path = ""
        self._value, self._wanted, self._missing = value, wanted, missing

    def inside(self, step: str) -> _Misfit:
        """The same, seen from one level higher."""
        self.path = step + ("." if self.path and not self.path.startswith("[") else "") + self.path
        return self

    def error(self, where: str) -> RecordError:
        if self._missing:
            return RecordError(
                f"{where} lacks the field `{self.path}`",
                cause=f"a `{self._wanted}` record always has it: the file is torn or was edited by hand",
                hint="measure again, or restore the file",
            )
        place = f"{where}: `{self.path}`" if self.path else where
        return RecordError(
            f"{place} is `{_short(self._value)}`, not {self._wanted}",
            cause="the file is torn, was edited by hand, or comes from another version",
            hint="measure again, or restore the file",
        )


def _at(step: str, convert: Callable[..., Any], *given: Any) -> Any:
    """What a conversion gives; what it refuses has the step to it in front of its path."""
    try:
        return convert(*given)
    except _Misfit as problem:
        raise problem.inside(step) from None


def _short(value: Any) -> str:
    """How an error names a value: its beginning, on one line."""
    try:
        text = " ".join(str(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists in lists
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@lru_cache(maxsize=256)
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Each field's name, type, and whether it must be there."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (f.name, hints[f.name], f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
        for f in dataclasses.fields(kind)
    )


def _record(kind: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _Misfit(value, f"a `{kind.__name__}` record")
    found: dict[str, Any] = {}
    for name, hint, required in _fields(kind):
        if name in value:
            item = value[name]
            # a plain value, as nearly all are: a record may hold a million of them
            found[name] = item if type(item) is hint else _at(name, _convert, hint, item)
        elif required:
            raise _Misfit(None, kind.__name__, missing=True).inside(name)
    return kind(**found)


def _convert(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _record(hint, value)
    if origin in (typing.Union, types.UnionType):
        return _convert_union([a for a in arguments if a is not type(None)], value, len(arguments))
    if origin is typing.Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            raise _Misfit(value, "one of " + ", ".join(map(str, arguments)))
        return value
    if origin in (tuple, list):
        return _convert_list(origin, arguments, value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _Misfit(value, "an object")
        return {name: _at(str(name), _convert, arguments[1], item) for name, item in value.items()}
    if hint is float:
        return _convert_float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise _Misfit(value, _name(hint))


def _convert_list(origin: type[list[Any]] | type[tuple[Any, ...]], arguments: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _Misfit(value, "a list")
    alike = origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis)
    if not alike and len(arguments) != len(value):
        raise _Misfit(value, f"a list of {len(arguments)}")
    if alike and arguments[0] is float and all(type(item) is float for item in value):
        return origin(value)
    hints = itertools.repeat(arguments[0]) if alike else arguments
    return origin(_at(f"[{i}]", _convert, hint, item) for i, (item, hint) in enumerate(zip(value, hints, strict=False)))


def _convert_union(choices: list[Any], value: Any, num: int) -> Any:
    if value is None and len(choices) < num:
        return None
    for choice in choices if value is not None else ():
        try:
            return _convert(choice, value)
        except _Misfit as problem:
            if len(choices) == 1 or problem.path:  # the right kind with something wrong inside
                raise
    raise _Misfit(value, " or ".join(map(_name, choices)))


def _convert_float(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str) and value in _INFINITIES:
        return _INFINITIES[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise _Misfit(value, "float")


def _name(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))
