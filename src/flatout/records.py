"""How a record becomes JSON and comes back.

Records are frozen, slotted, keyword-only dataclasses; their JSON is derived from their fields, so that it is
written down once. In: a record or a JSON object. Out: the other one, or a `RecordError` that names the field.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from flatout.errors import RecordError

R = TypeVar("R")


def to_json(value: Any) -> Any:
    """The plain JSON value (dict, list, str, number, bool, None) of a record.

    >>> @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    ... class Point:
    ...     x_s: float
    ...     name: str | None = None
    >>> to_json(Point(x_s=0.5))
    {'x_s': 0.5, 'name': None}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return value


@lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def from_json(kind: type[R], value: Any, *, where: str = "record") -> R:
    """The record of type `kind` that `value` describes; unknown fields are ignored, so that old readers read on.

    Args:
        kind: A record class.
        value: What `json.loads` returned.
        where: Named in the error, e.g. the file and line.

    Raises:
        RecordError: A field is missing or has another type.
    """
    if not isinstance(value, Mapping):
        raise _misfit(where, kind.__name__, value)
    hints = _hints(kind)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in value:
            found[field.name] = _convert(hints[field.name], value[field.name], f"{where}: `{field.name}`")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(
                f"{where} lacks the field `{field.name}`",
                cause=f"a `{kind.__name__}` record always has it: the file is torn or was edited by hand",
                hint="measure again, or restore the file",
            )
    return kind(**found)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is typing.Literal:
        return value if value in arguments else _fail(where, "one of " + ", ".join(map(str, arguments)), value)
    if origin in (tuple, list):
        if not isinstance(value, list):
            _fail(where, "a list", value)
        if (len(arguments) == 2 and arguments[1] is Ellipsis) or origin is list:
            return origin(_convert(arguments[0], v, where) for v in value)
        return tuple(_convert(a, v, where) for a, v in zip(arguments, value, strict=True))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            _fail(where, "an object", value)
        return {k: _convert(arguments[1], v, where) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type[Any], hint), value, where=where)
    return _convert_plain(hint, value, where)


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    rest = [a for a in arguments if a is not type(None)]
    for choice in rest[:-1]:
        try:
            return _convert(choice, value, where)
        except RecordError:
            continue
    return _convert(rest[-1], value, where)


def _convert_plain(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        _fail(where, "int", value)
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    return _fail(where, getattr(hint, "__name__", str(hint)), value)


def _fail(where: str, wanted: str, value: Any) -> typing.NoReturn:
    raise _misfit(where, wanted, value)


def _misfit(where: str, wanted: str, value: Any) -> RecordError:
    return RecordError(
        f"{where} is `{str(value)[:60]}`, not {wanted}",
        cause="the file is torn, was edited by hand, or comes from another version",
        hint="measure again, or restore the file",
    )
