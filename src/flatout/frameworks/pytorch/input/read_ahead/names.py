"""Where in a dataset do the names of its items' files lie?

Only what lies open is looked at: the dataset's own attributes, as far as they are of Python's, NumPy's or pandas' own
types. None of the script's code runs. What is found are guesses: whether the script opens these files is for others to
see. In: a dataset. Out: columns, each of which has a path for an index.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import Dataset, Subset

MOST_COLUMNS = 16
MOST_PARTS = 8
"""Of a row: a tuple or a dictionary in a list."""

MOST_ROOTS = 6
MOST_LETTERS = 4096
MOST_DEPTH = 4
"""Datasets within each other."""

Index: TypeAlias = Callable[[int], int | None]
"""Which row of the innermost dataset an index stands for."""

_ORDERS = (list, tuple, range, np.ndarray)
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath)


class Column:
    """One place where a name lies for each item.

    Args:
        values: The rows.
        part: Which part of a row is the name; None where it is all of it.
        row: Which row belongs to an index.
        root: What stands before a name that is no whole path.
    """

    def __init__(self, values: Any, part: int | str | None, row: Index, root: str = "") -> None:
        self._values = values
        self._part = part
        self._row = row
        self.root = root

    def under(self, root: str) -> Column:
        """The same with other folders before the names."""
        return Column(self._values, self._part, self._row, root)

    def name(self, index: int) -> str | None:
        """What lies there for an item; None where it is no name."""
        row = self._row(index)
        value = None if row is None else _at(self._values, row)
        return _text(value if self._part is None else _part(value, self._part))

    def path(self, index: int) -> str | None:
        """The path of an item's file; None where there is none."""
        name = self.name(index)
        return None if name is None else os.path.join(self.root, name)


def columns_of(dataset: Any, index: int) -> list[Column]:
    """Where names may lie: those that have one for `index`, once for each folder that may stand before it."""
    found: list[Column] = []
    for column, roots in _columns(dataset, index, lambda index: index, [], MOST_DEPTH):
        name = column.name(index)
        if name is None or not name or "\0" in name:
            continue
        found += [column] if os.path.isabs(name) else [column.under(root) for root in roots[:MOST_ROOTS]]
        if len(found) >= MOST_COLUMNS:
            break
    return found[:MOST_COLUMNS]


def _columns(dataset: Any, index: int, row: Index, roots: list[str], depth: int) -> Iterator[tuple[Column, list[str]]]:
    own = _attributes(dataset)
    if depth == 0 or own is None:
        return
    if type(dataset) is Subset:
        order = own.get("indices")
        yield from _columns(own.get("dataset"), index, _through(order, row), roots, depth - 1)
    else:
        folders = [text for text in map(_text, own.values()) if text is not None and len(text) <= MOST_LETTERS]
        roots = [*dict.fromkeys(["", *folders, *roots])]
        for value in list(own.values()):
            if issubclass(type(value), Dataset):
                yield from _columns(value, index, row, roots, depth - 1)
            for rows in _rows(value):
                yield from ((column, roots) for column in _parted(rows, index, row))


def _attributes(dataset: Any) -> dict[str, Any] | None:
    """The attributes that lie in an object, without asking it."""
    try:
        own = object.__getattribute__(dataset, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def _rows(value: Any) -> Iterator[Any]:
    """What can be taken rows of, in one attribute."""
    pandas = sys.modules.get("pandas")
    kind = type(value)
    if kind in (list, tuple) or (kind is np.ndarray and value.ndim == 1 and value.dtype.kind in "UO"):
        yield value
    elif kind is dict:
        yield from (one for one in list(value.values())[:MOST_PARTS] if type(one) in (list, tuple))
    elif pandas is not None and kind is getattr(pandas, "Series", None):
        yield from _of_pandas(value.array)
    elif pandas is not None and kind is getattr(pandas, "DataFrame", None):
        for number in range(min(value.shape[1], MOST_PARTS)):
            yield from _of_pandas(value.iloc[:, number].array)


def _of_pandas(array: Any) -> Iterator[Any]:
    if type(array).__module__.startswith("pandas."):
        yield array


def _parted(values: Any, index: int, row: Index) -> Iterator[Column]:
    """The columns of one attribute: its rows, or parts of them."""
    number = row(index)
    first: Any = None if number is None else _at(values, number)
    if type(first) in (tuple, list):
        yield from (Column(values, part, row) for part in range(min(len(first), MOST_PARTS)))
    elif type(first) is dict:
        yield from (Column(values, part, row) for part in list(first)[:MOST_PARTS] if type(part) is str)
    else:
        yield Column(values, None, row)


def _through(order: Any, row: Index) -> Index:
    """The row behind an order."""

    def behind(index: int) -> int | None:
        number = row(index)
        found: Any = None if number is None or type(order) not in _ORDERS else _at(order, number)
        return int(found) if type(found) is int or issubclass(type(found), np.integer) else None

    return behind


def _at(values: Any, number: int) -> Any:
    """One element; None where there is none."""
    return values[number] if -len(values) <= number < len(values) else None


def _part(value: Any, part: int | str) -> Any:
    if type(value) in (tuple, list) and isinstance(part, int):
        return value[part] if part < len(value) else None
    return value.get(part) if type(value) is dict else None


def _text(value: Any) -> str | None:
    if type(value) is str:
        return value
    return str(value) if type(value) in _PATHS or type(value) is np.str_ else None
