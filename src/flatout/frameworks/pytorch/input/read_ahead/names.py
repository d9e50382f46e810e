"""Where in a dataset do the names of its items' files lie?

Only what lies open is looked at: the dataset's own attributes, as far as they are of Python's, NumPy's or pandas' own
types. None of the script's code runs. What is found are guesses: whether the script opens these files is for others to
see. In: a dataset. Out: columns, each of which has a path for an index.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Column:
    """One place where a name lies for each item.

    Attributes:
        values: The rows.
        part: Which part of a row is the name; None where it is all of it.
        row: Which row belongs to an index.
        root: What stands before a name that is no whole path.
    """

    values: Any
    part: int | str | None
    row: Index
    root: str = ""

    def path(self, index: int) -> str | None:
        """The path of an item's file; None where there is none."""
        value = _at(self.values, self.row(index))
        if self.part is not None:
            within = type(value) is dict or (type(value) in (tuple, list) and self.part in range(len(value)))
            value = (value.get(self.part) if type(value) is dict else value[self.part]) if within else None
        name = _text(value)
        return os.path.join(self.root, name) if name and "\0" not in name else None


def columns_of(dataset: Any, index: int) -> list[Column]:
    """Where names may lie: those that have one for `index`, once for each folder that may stand before it."""
    found: list[Column] = []
    for values, row, roots in _lists(dataset, lambda index: index, [""], MOST_DEPTH):
        first = _at(values, row(index))
        parts: list[Any] = [None]
        if type(first) in (tuple, list, dict):
            parts = list(first if type(first) is dict else range(len(first)))[:MOST_PARTS]
        for part in parts:
            path = Column(values, part, row).path(index)
            if path is not None:
                befores = [""] if os.path.isabs(path) else roots[:MOST_ROOTS]
                found += [Column(values, part, row, root) for root in befores]
    return found[:MOST_COLUMNS]


def _lists(dataset: Any, row: Index, roots: list[str], depth: int) -> Iterator[tuple[Any, Index, list[str]]]:
    """What has a value for each item: with the row of an index, and folders in which files may lie."""
    own = getattr(dataset, "__dict__", None)
    if depth == 0 or type(own) is not dict:
        return
    if type(dataset) is Subset:
        yield from _lists(own.get("dataset"), _through(own.get("indices"), row), roots, depth - 1)
        return
    folders = [text for text in map(_text, own.values()) if text is not None and len(text) <= MOST_LETTERS]
    roots = [*dict.fromkeys([roots[0], *folders, *roots])]
    for value in list(own.values()):
        kind = type(value)
        if issubclass(kind, Dataset):
            yield from _lists(value, row, roots, depth - 1)
        elif kind in (list, tuple) or (kind is np.ndarray and value.ndim == 1 and value.dtype.kind in "UO"):
            yield value, row, roots
        elif kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
            table = value.to_frame() if kind.__name__ == "Series" else value
            for number in range(min(table.shape[1], MOST_PARTS)):
                yield table.iloc[:, number].array, row, roots


def _through(order: Any, row: Index) -> Index:
    """The row behind an order."""

    def behind(index: int) -> int | None:
        found: Any = _at(order, row(index)) if type(order) in _ORDERS else None
        return int(found) if type(found) is int or issubclass(type(found), np.integer) else None

    return behind


def _at(values: Any, number: int | None) -> Any:
    """One element; None where there is none."""
    return values[number] if number is not None and -len(values) <= number < len(values) else None


def _text(value: Any) -> str | None:
    if type(value) is str:
        return value
    return str(value) if type(value) in _PATHS or type(value) is np.str_ else None
