"""Rows of a Hugging Face `datasets.Dataset`, taken out of its Arrow table column by column.

Its own path makes a NumPy array, then a tensor, of each list of each row. In: a dataset in the format `torch`, or with
none, and indices. Out: the leaves of the item, each as `Rows`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from flatout.frameworks.pytorch.input.items.operations import Operation
from flatout.frameworks.pytorch.input.items.recording import Recording, Seen
from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised

_RUN = ("__getitem__", "__getitems__", "_getitem")
"""Methods that fetch, which have to be the library's own."""


def is_table(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset`, and no class derived from it."""
    return type(dataset) is getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)


def row_of_table(recording: Recording, dataset: Seen, index: Seen) -> Seen:
    """The item of a table.

    Raises:
        Unread: Its format or its columns are not known.
    """
    table = dataset.value
    if table._format_type not in (None, "torch") or table._format_kwargs:
        raise recording.unread(f"a table in the format `{table._format_type}`")
    kind, state = type(table), _state(table)
    code = [vars(kind)[name] for name in _RUN]
    recording.guard(kind, "code", lambda: [vars(kind)[name] for name in _RUN] == code)
    item = table[index.value]
    if type(item) is not dict or any(isinstance(value, list | dict) for value in item.values()):
        raise recording.unread("a table with columns of lists, which collate into a tensor for each place")
    names = tuple(item)

    def rows(now: Any, numbers: Rows) -> list[Rows]:
        if _state(now) != state:
            raise Unvectorised("the table's format has changed since it was read")
        return _columns(now, names, numbers.data)

    together = Operation("datasets.Dataset", lambda *_: tree_leaves(item), rows, fresh=True)
    return recording.shaped(item, recording.apply(together, [dataset, index]))


def _state(table: Any) -> tuple[Any, ...]:
    columns = table._format_columns
    return table._format_type, dict(table._format_kwargs), columns and tuple(columns), id(table._info.features)


def _columns(table: Any, names: tuple[str, ...], numbers: list[int]) -> list[Rows]:
    query_table = sys.modules["datasets.formatting.formatting"].query_table
    found = query_table(table._data, numbers, indices=table._indices)
    of_column = _as_torch if table._format_type == "torch" else _as_python
    return [of_column(found.column(name)) for name in names]


def _as_torch(column: Any) -> Rows:
    """A column as the format `torch` gives it: integers of 64 bits, floats of 32."""
    kind = str(column.type)
    if kind in _TEXTS:
        return Rows("str", _whole(column).to_pylist())
    if kind not in _NUMBERS and not kind.startswith(("list<", "large_list<", "fixed_size_list<")):
        raise Unvectorised(f"a column of type {kind}")
    array = _whole(column.combine_chunks())
    if kind in _NUMBERS:
        return Rows("tensor", _tensor(array))
    values = _whole(array.flatten())
    if str(values.type) not in _NUMBERS or not len(values) or len(values) % len(array):
        raise Unvectorised("lists of something else than numbers, or of different lengths")
    length = len(values) // len(array)
    if not kind.startswith("fixed") and bool((array.value_lengths().to_numpy() != length).any()):
        raise Unvectorised("lists of different lengths")
    return Rows("tensor", _tensor(values).view(len(array), length))


def _as_python(column: Any) -> Rows:
    """A column as Python's own values."""
    kind, values = str(column.type), _whole(column)
    if kind in _TEXTS:
        return Rows("str", values.to_pylist())
    if kind in ("float", "double"):
        return Rows("float", values.to_pylist())
    if kind in _NUMBERS and "int" in kind:
        return Rows("int", values.to_pylist())
    raise Unvectorised(f"a column of type {kind}")


def _tensor(array: Any) -> torch.Tensor:
    values = np.array(array.to_numpy(zero_copy_only=False))
    if values.dtype.kind == "b":
        return torch.from_numpy(values)
    return torch.from_numpy(values.astype(np.int64 if values.dtype.kind in "iu" else np.float32))


def _whole(array: Any) -> Any:
    if array.null_count:
        raise Unvectorised("a column in which values are missing")
    return array


_NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "halffloat", "float", "double")
_TEXTS = ("string", "large_string")
