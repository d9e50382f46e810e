"""What is taken out of a container by an index, or out of each item's value by one that all items share.

In: containers and `Rows`. Out: `Rows`, in memory of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flatout.frameworks.pytorch.pipeline.rows import Kind, Rows, Unvectorised, gathered

_FOR_ALL = (int, slice, type(None), type(Ellipsis))


def subscript(container: Any, key: Any) -> Any:
    """`container[key]`, where one of them differs from item to item."""
    if type(container) is Rows:
        return _within(container, key)
    if type(key) is slice:
        return _window(container, key)
    if type(key) is not Rows or key.kind != "int":
        raise Unvectorised("an index that is no integer")
    return _taken(container, key.data)


def _taken(container: Any, index: np.ndarray) -> Rows:
    kind = type(container)
    if kind is torch.Tensor and container.device.type == "cpu" and container.layout is torch.strided:
        if container.requires_grad:
            raise Unvectorised("a tensor with a history")
        return Rows("tensor", container[torch.from_numpy(index)])
    if kind in (np.ndarray, np.memmap):
        found = np.asarray(container)[index]
        return Rows("scalar" if found.ndim == 1 else "array", found)
    if kind in (list, tuple, range):
        values = [container[number] for number in index.tolist()]
        kinds: dict[type, Kind] = {int: "int", float: "float", str: "str"}
        if values and type(values[0]) in kinds:
            return gathered(values, kinds[type(values[0])])
    raise Unvectorised(f"an index into `{kind.__name__}`")


def _window(container: Any, key: slice) -> Rows:
    """`container[start : stop]`, all of one length."""
    start, stop = key.start, key.stop
    if key.step is not None or type(start) is not Rows or type(stop) is not Rows:
        raise Unvectorised("a slice that does not move with the index")
    first, after = start.data, stop.data
    lengths = after - first
    if not len(lengths) or (lengths != lengths[0]).any() or lengths[0] <= 0 or first.min() < 0:
        raise Unvectorised("slices of different lengths")
    length = int(lengths[0])
    if type(container) is torch.Tensor and container.device.type == "cpu" and not container.requires_grad:
        if after.max() > len(container) or container.dim() != 1:
            raise Unvectorised("slices that reach beyond the end")
        return Rows("tensor", container.unfold(0, length, 1)[torch.from_numpy(first)])
    if type(container) in (np.ndarray, np.memmap):
        if after.max() > len(container) or container.ndim != 1:
            raise Unvectorised("slices that reach beyond the end")
        return Rows("array", np.lib.stride_tricks.sliding_window_view(np.asarray(container), length)[first])
    raise Unvectorised(f"a slice of `{type(container).__name__}`")


def _within(value: Rows, key: Any) -> Rows:
    """The same part of each item's tensor or array."""
    parts = key if type(key) is tuple else (key,)
    if value.kind not in ("tensor", "array") or any(type(part) not in _FOR_ALL for part in parts):
        raise Unvectorised("a part of something else than a tensor or an array")
    found = value.data[(slice(None), *parts)]
    kind: Kind = "scalar" if value.kind == "array" and found.ndim == 1 else value.kind
    return Rows(kind, found)
