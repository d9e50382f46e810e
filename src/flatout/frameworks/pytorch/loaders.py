"""How are batches fetched, and how can that be changed while the script runs?

`DataLoader.__iter__` is replaced so that each pass over a loader is a `Pass`: it times fetches, can fetch with other
worker settings, can start over instead of ending (in a trial), and can hand out one cached batch (a counterfactual).
In: the loaders that the script iterates. Out: batches, and what is known about the loaders.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, SequentialSampler

WORKER_ATTRIBUTES = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")


class FetchObserver(Protocol):
    """Who wants to know of fetches."""

    def before_fetch(self) -> None:
        """A batch is asked for."""

    def after_fetch(self) -> None:
        """The batch is there, or the pass is over."""


class Pass:
    """One pass over a loader, as the script's `for` loop sees it."""

    def __init__(self, loader: DataLoader[Any], owner: Loaders) -> None:
        self._loader = loader
        self._owner = owner
        self._generation = owner.generation
        self._inner = owner.open(loader)
        self._cached: Any = None
        self.num_fetches = 0
        self.num_steps_before = owner.num_steps
        self.trains = False

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __next__(self) -> Any:
        owner = self._owner
        if self.num_fetches and owner.num_steps > self.num_steps_before:
            self.trains = True
        self.num_steps_before = owner.num_steps
        observer = owner.observer
        if observer is not None:
            observer.before_fetch()
        try:
            return self._fetch()
        finally:
            if observer is not None:
                observer.after_fetch()

    def _fetch(self) -> Any:
        owner = self._owner
        if owner.reopen and self._generation != owner.generation and self.trains:
            self._reopen()
        if owner.replay_batch and self.trains:
            if self._cached is None:
                self._cached = self._draw()
            return self._cached
        self._cached = None
        return self._draw()

    def _draw(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            self._owner.exhausted(self._loader, self._inner)
            if not (self._owner.endless and self.trains):
                raise
            self._owner.num_restarts += 1
            self._reopen()
            batch = next(self._inner)
        self.num_fetches += 1
        self._owner.note(self._loader, self.trains)
        return batch

    def _reopen(self) -> None:
        self._generation = self._owner.generation
        self._inner = self._owner.open(self._loader)


class Loaders:
    """All loaders of a process, and how they are run."""

    def __init__(self) -> None:
        self.observer: FetchObserver | None = None
        self.settings: dict[str, Any] = {}
        """Worker attributes that replace the script's own while a pass is opened; empty means as the script says."""
        self.generation = 0
        """Rises when `settings` changed; passes of a trial open again at their next fetch."""
        self.reopen = False
        """Whether passes that are under way open again when `settings` change (in a trial)."""
        self.endless = False
        self.replay_batch = False
        self.num_steps = 0
        self.num_restarts = 0
        self.num_changed = 0
        """Passes opened with `settings`."""
        self._original = DataLoader.__iter__
        self._installed = False
        self._training: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[DataLoader[Any], Any] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Replace `DataLoader.__iter__`."""
        if self._installed:
            return
        original = self._original

        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            if torch.utils.data.get_worker_info() is not None or torch.compiler.is_compiling():
                return original(loader)
            observer = self.observer
            if observer is None:
                return Pass(loader, self)
            observer.before_fetch()
            try:
                return Pass(loader, self)
            finally:
                observer.after_fetch()

        DataLoader.__iter__ = __iter__  # type: ignore[method-assign,assignment]
        self._installed = True

    def remove(self) -> None:
        """Give the class its own `__iter__` back."""
        if self._installed:
            DataLoader.__iter__ = self._original  # type: ignore[method-assign]
            self._installed = False

    @property
    def training(self) -> list[DataLoader[Any]]:
        """Loaders whose batches were followed by steps, most used first."""
        return sorted(self._training, key=lambda loader: -self._training[loader])

    def note(self, loader: DataLoader[Any], trains: bool) -> None:
        """A batch was drawn from `loader`."""
        if trains:
            self._training[loader] = self._training.get(loader, 0) + 1

    def change(self, settings: Mapping[str, Any]) -> None:
        """Run training loaders with these worker attributes from their next pass on (in a trial: next fetch)."""
        if dict(settings) != self.settings:
            self.settings = dict(settings)
            self.generation += 1
            self.close_kept()

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The loader's own iterator, made under the present settings."""
        if not self.settings or not self.may_change(loader) or not self._feeds_training(loader):
            return self._original(loader)
        return self._open_changed(loader)

    def _feeds_training(self, loader: DataLoader[Any]) -> bool:
        # A loader in order is most often an evaluation's, for which starting workers each time would cost; it is
        # left alone until it has been seen to train.
        return loader in self._training or not isinstance(loader.sampler, SequentialSampler)

    def may_change(self, loader: DataLoader[Any]) -> bool:
        """Whether the loader's workers can be set without asking it to do what it does not do."""
        return type(loader).__iter__ is DataLoader.__iter__ and loader.multiprocessing_context is None

    def _open_changed(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self.num_changed += 1
        kept = self._kept.pop(loader, None)
        former = {name: getattr(loader, name) for name in WORKER_ATTRIBUTES}
        wanted = {**former, **self.settings}
        if not wanted["num_workers"]:
            wanted.update(prefetch_factor=None, persistent_workers=False)
        try:
            loader.__dict__.update(wanted)
            if kept is not None:
                # Workers stay, but the script's random stream must move as it does for new workers: one draw first.
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
                kept._reset(loader)
                return kept  # type: ignore[no-any-return]
            return loader._get_iterator()
        finally:
            loader.__dict__.update(former)

    def exhausted(self, loader: DataLoader[Any], iterator: Any) -> None:
        """A pass is over; persistent workers of ours are kept for the next one."""
        if self.settings.get("persistent_workers") and getattr(iterator, "_num_workers", 0) and self.may_change(loader):
            self._kept[loader] = iterator

    def close_kept(self) -> None:
        """End workers that wait for a next pass."""
        for iterator in list(self._kept.values()):
            iterator._shutdown_workers()
        self._kept.clear()
