"""Is everything that a batch was begun with still as it was? The training may have changed it since then.

The settings of PyTorch, PIL and the process; the code; the data that the code refers to; the files that were opened. Of
much data only what lies at the items' own indices is looked at. In: a dataset and indices. Out: whether nothing has
changed.
"""

from __future__ import annotations

import operator
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile
from torch.utils.data import ConcatDataset, Subset

from flatout.frameworks.pytorch.input.harmless.guards import Guards
from flatout.frameworks.pytorch.input.items.flushing import flushes_to_zero
from flatout.frameworks.pytorch.input.pixels.decoded import Identity, identity_of
from flatout.guest.interruptions import let_through

MOST_ALL = 64
"""Elements of a container of which all are looked into."""

MOST_SHALLOW = 10_000
"""Elements of one of which it is seen whether they are the same objects."""

MOST_BYTES = 2**16
"""Bytes of an array, or of a row of one, that are compared."""

MOST_DEPTH = 5

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_DICTIONARIES = (dict, OrderedDict)
_SEQUENCES = (list, tuple, deque)


class Surroundings:
    """What a batch was begun with."""

    def __init__(self, guards: Guards, dataset: Any, indices: list[int], files: Iterable[File]) -> None:
        self._guards = guards
        self._files = list(files)
        self._places: list[int] = []
        self._data: list[tuple[Any, Any]] | None = None
        try:
            self._places = sorted({int(place) for index in indices for place in _reached(dataset, index)})
            self._data = [(root, _taken(root, self._places)) for root in guards.data()]
        except Exception as problem:  # noqa: BLE001  what cannot be looked at does not hold
            let_through(problem)

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        try:
            return (
                self._data is not None
                and self._guards.hold()
                and all(_taken(root, self._places) == before for root, before in self._data)
                and all(file.holds() for file in self._files)
            )
        except Exception as problem:  # noqa: BLE001  what can no longer be looked at does not hold
            let_through(problem)
            return False


def settings_now() -> tuple[Any, ...]:
    """The settings that an item may depend on."""
    return (
        *(bool(ImageFile.LOAD_TRUNCATED_IMAGES), Image.MAX_IMAGE_PIXELS, ImageFile.MAXBLOCK),
        *(torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
        *(torch.get_default_device(), flushes_to_zero(), tuple(np.geterr().items())),
        _working_directory(),
    )


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


# -- files ---------------------------------------------------------------------------------------------------------


class File:
    """A file that was opened under a name."""

    def __init__(self, name: str | bytes) -> None:
        self._name = name
        self._identity = self._now()

    def holds(self) -> bool:
        """Whether the name still stands for the same file, and nobody has written to it."""
        return self._identity is not None and self._now() == self._identity

    def _now(self) -> Identity | None:
        try:
            return identity_of(os.stat(self._name))
        except OSError:
            return None


def file_of(opened: Any) -> File | None:
    """The file that was given to PIL's `open`; None for one that is not on the disk."""
    name = os.fspath(opened) if isinstance(opened, str | bytes | os.PathLike) else getattr(opened, "name", None)
    return File(name) if isinstance(name, str | bytes) else None


# -- data ----------------------------------------------------------------------------------------------------------


class _Same:
    """Objects, each of which has to be the one that it was."""

    def __init__(self, *things: Any) -> None:
        self._things = things

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or len(self._things) != len(other._things):
            return False
        return all(map(operator.is_, self._things, other._things))

    __hash__ = None  # type: ignore[assignment]


def _reached(dataset: Any, index: int) -> Iterator[int]:
    """The index, and what it becomes in datasets of datasets."""
    while True:
        yield index
        if type(dataset) is Subset:
            index, dataset = dataset.indices[index], dataset.dataset
        elif type(dataset) is ConcatDataset:
            place = next(place for place, size in enumerate(dataset.cumulative_sizes) if index % len(dataset) < size)
            index = index % len(dataset) - (dataset.cumulative_sizes[place - 1] if place else 0)
            dataset = dataset.datasets[place]
        else:
            return


def _taken(thing: Any, places: list[int], depth: int = 0) -> Any:
    """What items may take of a value, to be compared; at `places` where it is large."""
    kind = type(thing)
    if kind in _SCALARS:
        return kind, thing
    if depth > MOST_DEPTH:
        return _Same(thing)
    if kind in _DICTIONARIES or kind in _SEQUENCES:
        return kind, len(thing), *_of_container(thing, places, depth)
    if kind in (set, frozenset):
        return kind, len(thing), _Same(*thing) if len(thing) <= MOST_SHALLOW else None
    if isinstance(thing, torch.Tensor):
        return _of_tensor(thing, places)
    if isinstance(thing, np.ndarray):
        return _Same(thing), *_of_array(thing, places)
    return bytes(thing) if kind is bytearray and len(thing) <= MOST_BYTES else _Same(thing)


def _of_container(thing: Any, places: list[int], depth: int) -> Iterator[Any]:
    values = thing.values() if type(thing) in _DICTIONARIES else thing
    if type(thing) in _DICTIONARIES and len(thing) <= MOST_SHALLOW:
        yield _Same(*thing)
    if len(thing) <= MOST_ALL:
        yield [_taken(part, places, depth + 1) for part in values]
        return
    if len(thing) <= MOST_SHALLOW:
        yield _Same(*values)
    size = len(thing)
    inside = (place in thing if type(thing) in _DICTIONARIES else -size <= place < size for place in places)
    yield [_taken(thing[place], [], depth + 1) for place, wanted in zip(places, inside, strict=True) if wanted]


def _of_tensor(tensor: torch.Tensor, places: list[int]) -> Any:
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return _Same(tensor)
    if tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return _Same(tensor), tensor._version
    data = tensor.detach()
    array = (data.view(torch.int16) if data.dtype is torch.bfloat16 else data).numpy()
    return _Same(tensor), tensor._version, *_of_array(array, places)  # somebody may have it as an array, too


def _of_array(array: np.ndarray, places: list[int]) -> Iterator[Any]:
    yield array.dtype, array.shape
    if array.dtype.hasobject:
        if array.size <= MOST_SHALLOW:
            yield _Same(*array.flat)
    elif array.nbytes <= MOST_BYTES:
        yield array.tobytes()
    elif array.ndim and array.nbytes <= MOST_BYTES * len(array):
        yield [array[place].tobytes() for place in places if -len(array) <= place < len(array)]
