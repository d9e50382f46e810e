"""Batches computed at once, where the item program of a dataset is known.

A `FusedFetcher` stands in a loader's own iterator in the place of PyTorch's fetcher, so that seeds, sampler, laziness,
order, pinning and ends stay PyTorch's. What it cannot do, the fetcher that was there does. In: a loader's iterator.
Out: the same batches.
"""

from __future__ import annotations

import threading
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from flatout.frameworks.pytorch.input.items.draws import skip
from flatout.frameworks.pytorch.input.items.program import Program
from flatout.frameworks.pytorch.input.items.reading import Unread, read
from flatout.frameworks.pytorch.input.items.rows import OneThread, Rows, Unvectorised, collated
from flatout.frameworks.pytorch.input.items.shadow import Shadow
from flatout.frameworks.pytorch.input.reach import read_outside
from flatout.frameworks.pytorch.input.worker_settings import KEPT_WORKERS, start_method
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.script_code import is_the_scripts
from flatout.frameworks.pytorch.seams.unseen_warnings import unseen_warnings
from flatout.guest.interruptions import let_through

MOST_FAILURES = 8
"""Batches that could not be computed at once, after which it is no longer tried, unless four times as many could."""


class SetAsideError(Exception):
    """What the dataset computes was not what had been read."""


class FusedFetch:
    """All loaders of a process whose batches can be computed at once."""

    def __init__(self) -> None:
        self.num_batches = 0
        """Computed at once since it was engaged."""
        self.engaged = False
        self._readings: weakref.WeakKeyDictionary[DataLoader[Any], Reading] = weakref.WeakKeyDictionary()

    def engage(self, on: bool) -> None:
        """From the next fetch on, or no longer."""
        self.engaged, self.num_batches = on, 0

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Put a fetcher of ours into an iterator that fetches in this process."""
        if type(iterator) is not _SingleProcessDataLoaderIter or _unsuited(loader) is not None:
            return
        if type(iterator._dataset_fetcher) is _MapDatasetFetcher:
            iterator._dataset_fetcher = FusedFetcher(self, iterator._dataset_fetcher, self.reading(loader))

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool = False) -> str | None:
        """Why the batches of a loader cannot be computed at once, in a few words; None where they can.

        `for_workers`: whether they are to be computed in place of workers.
        """
        why = _unsuited(loader, for_workers=for_workers)
        if why is None:
            reading = self.reading(loader)
            reading.begin()
            why = reading.why_not
            if for_workers and loader.persistent_workers and reading.program is not None and reading.program.draws:
                why = KEPT_WORKERS
            if for_workers and why is None and (name := _outside(reading.program)):
                why = f"its items read `{name}`, which workers would have as it was when they began"
        return why

    def reading(self, loader: DataLoader[Any]) -> Reading:
        """What is known about a loader's dataset."""
        found = self._readings.get(loader)
        if found is None or found.dataset is not loader.dataset:
            found = self._readings[loader] = Reading(loader.dataset)
        return found


class Reading:
    """What is known about the dataset of one loader."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.why_not: str | None = None
        self.program: Program | None = None
        self.shadow = Shadow()
        self.num_failures = self.num_computed = 0
        self._begun = False

    def begin(self) -> None:
        """Read the dataset, where that was not done; see that its code is still the one that was read."""
        if self._begun:
            if self.program is not None and not self.program.holds():
                self.set_aside("its code has changed since it was read")
            return
        self._begun = True
        states = RandomStates()
        try:
            with unseen_warnings():
                _, program = read(self.dataset, 0)
                computed(program, self.dataset, [0])
            self.program = program
        except (Unread, Unvectorised) as problem:
            self.why_not = f"its items cannot be computed at once: {problem}"
        except Exception as problem:  # noqa: BLE001  a dataset may be of any kind, and plain is always there
            self.why_not = f"{type(problem).__name__} while it was read"
            let_through(problem)
        finally:
            states.restore()

    def set_aside(self, why: str) -> None:
        """Never again."""
        self.program, self.why_not = None, why


def _unsuited(loader: DataLoader[Any], *, for_workers: bool = False) -> str | None:
    """Why a loader does not come into question, whatever its dataset computes.

    `for_workers`: it takes the place of workers, not of fetching in the script's own process.
    """
    if loader.collate_fn is not default_collate:
        return "the batches are put together by a function of the script's"
    if for_workers != bool(loader.num_workers):
        return "the script has no workers" if for_workers else "the script's workers fetch"
    if for_workers and (loader.worker_init_fn is not None or not getattr(loader, "in_order", True)):
        return "the workers begin with a function of the script's, or give batches out of order"
    if for_workers and loader.timeout > 0:
        return "the script says how long a worker may take"
    if for_workers and start_method(loader) != "fork":
        return "the workers are not forked, and have other values than this process"
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if hasattr(type(dataset), "__getitems__"):
        return "the dataset gives several items at once"
    return None


def _outside(program: Program | None) -> str | None:
    """The name of something outside the dataset that items read and the script may write to; arrays apart."""
    for function in filter(is_the_scripts, program.functions if program is not None else ()):
        for name, value in read_outside(function).items():
            code = isinstance(value, type | types.FunctionType | types.ModuleType | property)
            if type(value) in (dict, list, set) or (not code and is_the_scripts(type(value))):
                return name
    return None


class FusedFetcher:
    """What an iterator asks for the batch of some indices."""

    def __init__(self, owner: FusedFetch, original: Any, reading: Reading, *, in_process: bool = False) -> None:
        self._owner = owner
        self._in_process = in_process
        """Whether it stands for workers: then it fetches though the lever for loaders without them is not engaged, and
        what it cannot compute is not fetched by the script's own path here, with other random numbers, but by them."""
        self.original = original
        self.dataset = original.dataset
        self.reading = reading
        self._begun = False
        self.known = False
        """Whether the latest batch is what the program gives, and not what the script did in its place."""

    def plain(self, indices: Any) -> Any:
        """The batch by the script's own path."""
        if self._in_process:
            raise SetAsideError(self.reading.why_not or "what was read does not hold for all items")
        return self.original.fetch(indices)

    def fetch(self, indices: Any, *, always: bool = False) -> Any:
        """The batch; `always`: computed at once though the lever is not engaged."""
        reading = self.reading
        self.known = False
        if not (self._owner.engaged or self._in_process or always) or type(indices) is not list or not indices:
            return self.plain(indices)
        if not self._begun:
            self._begun = True
            reading.begin()
        program = reading.program
        if (
            program is None
            or set(map(type, indices)) != {int}
            or (program.draws and threading.current_thread() is not threading.main_thread())
        ):
            return self.plain(indices)
        before = torch.get_rng_state() if program.draws else None
        try:
            batch = computed(program, self.dataset, indices)
        except Exception as problem:  # noqa: BLE001  plain has it, or the error that belongs here
            let_through(problem)
            batch = None
            reading.num_failures += 1
            if reading.num_failures >= max(MOST_FAILURES, reading.num_computed / 4):
                reading.set_aside(f"{reading.num_failures} batches could not be computed at once: {problem}")
        if batch is None:  # not while that is handled, of which plain's error would tell
            if before is not None:
                torch.set_rng_state(before)
            return self.plain(indices)
        reading.num_computed += 1
        return self._shadowed(batch, indices, before)

    def _shadowed(self, batch: Any, indices: list[int], before: torch.Tensor | None) -> Any:
        """The batch, or the script's own where it is to be that; `before`: the random stream's state, if it moved."""
        reading, single_path = self.reading, self.original.fetch
        after = torch.get_rng_state() if before is not None else None
        if reading.shadow.first:
            if before is not None:
                torch.set_rng_state(before)
            own = single_path(indices)
            if why := reading.shadow.of_batch(batch, own):
                reading.set_aside(f"its batches differ: {why}")
            elif after is not None and not torch.equal(after, torch.get_rng_state()):
                reading.set_aside("its batches differ: its items draw other random numbers")
            self.known = not why
            return own
        if reading.shadow.any_due(len(indices)):
            num_words = len(reading.program.draws) if reading.program is not None else 0

            def plain(place: int) -> Any:
                if before is not None:  # with the random numbers that the item had
                    torch.set_rng_state(before)
                    skip(place * num_words)
                return single_path([indices[place]])

            if why := reading.shadow.of_items(batch, indices, plain):
                reading.set_aside(f"its batches differ: {why}")
                if before is not None:
                    torch.set_rng_state(before)
                return self.plain(indices)
            if after is not None:
                torch.set_rng_state(after)
        self._owner.num_batches += 1
        self.known = True
        return batch


def computed(program: Program, dataset: Any, indices: list[int]) -> Any:
    """The batch of these indices, on one thread: where others are busy, waiting for a second one costs more."""
    if not program.holds():
        raise Unvectorised("the code of the dataset has changed since it was read")
    with OneThread(), np.errstate(all="raise"):  # what plain warns of, it warns of itself
        return _assemble(program.compute(dataset, indices), set())


def _assemble(item: Any, places: set[int], *, paired: bool = False) -> Any:
    """The batch as `default_collate` puts it together, each tensor at a place of its own.

    `paired`: whether it is a part of a sequence, whose parts reach the collation as tuples.
    """
    kind = type(item)
    if kind is Rows:
        batch = collated(item)
        if type(batch) is list:
            return tuple(batch) if paired else list(batch)
        if batch.numel():
            if batch.data_ptr() in places:
                batch = batch.clone()
            places.add(batch.data_ptr())
        return batch
    if kind in (tuple, list):
        return [_assemble(part, places, paired=True) for part in item]
    if kind is dict:
        return {key: _assemble(part, places) for key, part in item.items()}
    raise Unvectorised("a part of the item that is the same for all")
