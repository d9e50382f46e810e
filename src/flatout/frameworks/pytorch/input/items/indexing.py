"""What is taken out of a container by an index, or out of each item's value by one that all items share.

In: containers and `Rows`. Out: `Rows`, in memory of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items.rows import Kind, Rows, Unvectorised, gathered, is_plain

_FOR_ALL = (int, slice, type(None), type(Ellipsis))


def subscript(container: Any, key: Any) -> Any:
    """`container[key]`, where one of them differs from item to item."""
    if type(container) is Rows:
        return _within(container, key)
    if type(key) is slice:
        if type(container) not in (torch.Tensor, np.ndarray, np.memmap):
            raise Unvectorised(f"a slice of `{type(container).__name__}`")
        return _window(container, key)
    if type(key) is not Rows or key.kind != "int":
        raise Unvectorised("an index that is no integer")
    return _taken(container, key)


def _taken(container: Any, index: Rows) -> Rows:
    kind = type(container)
    if kind is torch.Tensor and is_plain(container):
        return Rows("tensor", _rows_of(container, index))
    if kind in (np.ndarray, np.memmap):
        if container.dtype.kind not in "biufc":
            raise Unvectorised("an array of something else than numbers")
        found = np.asarray(container).take(_places(index), axis=0)  # several times as fast as `container[index]`
        return Rows("scalar" if found.ndim == 1 else "array", found)
    if kind in (list, tuple, range):
        values = [container[number] for number in index.data]
        return gathered(values, type(values[0]))
    raise Unvectorised(f"an index into `{kind.__name__}`")


def _rows_of(container: torch.Tensor, index: Rows) -> torch.Tensor:
    """`container[index]`, several times as fast where no index counts from the end."""
    places = torch.from_numpy(_places(index))
    return container.index_select(0, places) if index.data and min(index.data) >= 0 else container[places]


def _places(index: Rows) -> np.ndarray:
    """The numbers as an index."""
    return np.array(index.data, np.int64)


def _window(container: Any, key: slice) -> Rows:
    """`container[start : stop]`, all of one length."""
    start, stop = key.start, key.stop
    if key.step is not None or any(type(end) is not Rows or end.kind != "int" for end in (start, stop)):
        raise Unvectorised("a slice that does not move with the index")
    first, after = _places(start), _places(stop)
    lengths = after - first
    length = int(lengths[0])
    if length <= 0 or first.min() < 0 or (lengths != length).any():
        raise Unvectorised("slices of different lengths")
    if container.ndim != 1 or after.max() > len(container):
        raise Unvectorised("slices that reach beyond the end")
    if type(container) is torch.Tensor and is_plain(container):
        return Rows("tensor", container.unfold(0, length, 1)[torch.from_numpy(first)])
    if type(container) in (np.ndarray, np.memmap):
        if not container.flags.c_contiguous or container.dtype.hasobject:
            raise Unvectorised("slices of an array with gaps")
        step, shape = container.strides[0], (len(container) - length + 1, length)
        return Rows("array", np.ndarray(shape, container.dtype, buffer=container, strides=(step, step))[first])
    raise Unvectorised("a slice of a tensor that is not a plain one on the CPU")


def _within(value: Rows, key: Any) -> Rows:
    """The same part of each item's tensor or array."""
    parts = key if type(key) is tuple else (key,)
    if value.kind not in ("tensor", "array") or any(type(part) not in _FOR_ALL for part in parts):
        raise Unvectorised("a part of something else than a tensor or an array")
    found = value.data[(slice(None), *parts)]
    kind: Kind = "scalar" if value.kind == "array" and found.ndim == 1 else value.kind
    return Rows(kind, found)
