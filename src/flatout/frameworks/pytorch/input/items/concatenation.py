"""Items of several datasets one after another: each by the program of its own dataset, then in the order asked for.

In: the programs of a `ConcatDataset`'s parts, and indices. Out: the leaves of the item, each as `Rows`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from flatout.frameworks.pytorch.input.items.operations import Operation
from flatout.frameworks.pytorch.input.items.program import Program
from flatout.frameworks.pytorch.input.items.recording import Recording, Seen
from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised

MOST_PARTS = 64


def concatenated(
    recording: Recording, dataset: Seen, index: Seen, read: Callable[[Any, int], tuple[Any, Program]]
) -> Seen:
    """The item of a `ConcatDataset`, each of whose parts is read by `read`.

    Raises:
        Unread: There are too many parts, or the index is none of theirs.
    """
    datasets = dataset.value.datasets
    if len(datasets) > MOST_PARTS:
        raise recording.unread(f"more than {MOST_PARTS} datasets one after another")
    first = [0, *dataset.value.cumulative_sizes]
    number = bisect.bisect_right(first, index.value) - 1
    if index.value < 0 or number >= len(datasets):
        raise recording.unread("an index outside of the dataset, or from its end")
    read_parts = [read(part, index.value - first[number] if part is datasets[number] else 0) for part in datasets]
    programs = [program for _, program in read_parts]
    if any(program.draws for program in programs):
        raise recording.unread("random items of several datasets one after another")
    recording.guard(dataset.value, "parts", lambda: all(program.holds() for program in programs))
    item = read_parts[number][0]
    together = Operation(
        "ConcatDataset", lambda *_: tree_leaves(item), Concatenation(datasets, programs).rows, fresh=True
    )
    return recording.shaped(item, recording.apply(together, [dataset, index]))


class Concatenation:
    """The programs of a `ConcatDataset`'s parts."""

    def __init__(self, datasets: list[Any], programs: list[Program]) -> None:
        self._datasets = list(datasets)
        self._programs = programs

    def rows(self, dataset: Any, index: Rows) -> list[Rows]:
        """The leaves for these indices.

        Raises:
            Unvectorised: The parts are others than when they were read, or their items do not go together.
        """
        ends = np.array(dataset.cumulative_sizes)
        parts = dataset.datasets
        if len(parts) != len(self._datasets) or any(a is not b for a, b in zip(parts, self._datasets, strict=True)):
            raise Unvectorised("the parts of the dataset have changed since it was read")
        numbers = np.array(index.data)
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= ends[-1]:
            raise Unvectorised("an index outside of the dataset, or from its end")
        which = np.searchsorted(ends, numbers, side="right")
        places, found = [], []
        for number in np.unique(which):
            of_part = np.flatnonzero(which == number)
            local = numbers[of_part] - (ends[number - 1] if number else 0)
            places.append(of_part)
            found.append(tree_leaves(self._programs[number].compute(parts[number], local.tolist())))
        order = np.argsort(np.concatenate(places), kind="stable")
        if len({len(leaves) for leaves in found}) > 1:
            raise Unvectorised("parts with different items")
        return [_joined(list(leaves), order) for leaves in zip(*found, strict=True)]


def _joined(leaves: list[Any], order: np.ndarray) -> Rows:
    if any(type(leaf) is not Rows or leaf.kind != leaves[0].kind for leaf in leaves):
        raise Unvectorised("parts with different items")
    kind, data = leaves[0].kind, [leaf.data for leaf in leaves]
    if kind in ("int", "float", "str"):
        together = [value for leaf in leaves for value in leaf.listed()]
        return Rows(kind, [together[place] for place in order.tolist()])
    if any((one.dtype, one.shape[1:]) != (data[0].dtype, data[0].shape[1:]) for one in data):
        raise Unvectorised("parts with items of different types or shapes")
    if kind in ("tensor", "image_tensor"):
        if not all(one.is_contiguous() for one in data):
            raise Unvectorised("parts whose items do not lie row by row")
        return Rows(kind, torch.cat(data)[torch.from_numpy(order)])
    return Rows(kind, np.concatenate(data)[order])
