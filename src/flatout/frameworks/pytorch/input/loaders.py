"""How are batches fetched, and how can that be changed while the script runs?

`DataLoader.__iter__` is replaced so that each pass over a loader is a `Pass`
(`flatout.frameworks.pytorch.input.passes`). Here passes are opened, with the script's own worker settings or with
others; workers are kept between epochs where the script keeps its own. In: the loaders that the script iterates. Out:
iterators, and what is known about the loaders.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from flatout.frameworks.pytorch.input.passes import Pass
from flatout.frameworks.pytorch.input.plain_iterator import Opened
from flatout.frameworks.pytorch.input.shuffles import draw_seed, drawing_elsewhere, generators_of
from flatout.frameworks.pytorch.input.worker_settings import (
    IN_PROCESS,
    WORKER_ATTRIBUTES,
    is_pipe,
    keeps_workers,
    needs_workers,
    usable,
    wanted,
)
from flatout.frameworks.pytorch.seams.patches import Patch
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import tensors_of
from flatout.guest.caller_frames import caller_in
from flatout.guest.interruptions import let_through
from flatout.guest.tracebacks import hide_ours
from flatout.records.facts import NOT_LOOKED_AT

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.ahead.ahead import AheadOf
    from flatout.frameworks.pytorch.input.items.parts import InputParts
    from flatout.frameworks.pytorch.input.transfer.transfer import Transfer
    from flatout.frameworks.pytorch.input.watch import Watch
    from flatout.frameworks.pytorch.input.worker_check import Checks


class Loaders:
    """All loaders of a process, and how they are run."""

    def __init__(self) -> None:
        self.observer: Any = None
        """Whose `before_fetch` and `after_fetch` are called around each fetch of the script's."""
        self.on_fetch: Callable[[], None] | None = None
        """Told before each fetch of the script's, where fetches are taken for steps."""
        self.on_failure: Callable[[str, BaseException], None] | None = None
        self.settings: dict[str, Any] = {}
        """Worker attributes that replace the script's own while a pass is opened; empty means as the script says."""
        self.reopen = False
        """Whether training passes that are under way open again when `settings` change (in a trial)."""
        self.studies = False
        self.replayed: WeakKeyDictionary[DataLoader[Any], Any] | None = None
        """The batch that each loader gives again and again; None where they give what they have."""
        self.on_pass_end: Callable[[], None] | None = None
        """Told when a pass with whose batches steps were made is over."""
        self.num_steps = 0
        self.num_passes = self.num_smaller = 0
        """Passes begun over loaders that feed the training; batches that a pass gave last, smaller than its others."""
        self.num_changed = self.num_ahead = 0
        """Passes opened with `settings`; batches made ahead that were taken."""
        self._lasting: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        """Of loaders that keep their workers the pass under way, which plain's loops share."""
        self.passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self.store_memory_bytes: int | None = None
        """Memory for kept items; None: what is free allows."""
        self.admits_random = True
        """Whether workers of ours may draw other random numbers for items than plain does."""
        self._parts: InputParts | None = None
        self._transfer: Transfer | None = None
        self._pid = os.getpid()
        self._patch: Patch | None = None
        self._training: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
        """For each loader that feeds the training: batches used since a step, and that step."""
        self._batch_bytes: WeakKeyDictionary[DataLoader[Any], int | None] = WeakKeyDictionary()
        self._others: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        """Loaders of which a pass ended without a step."""
        self._refused: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        """Loaders that failed under other settings."""
        self._kept: WeakKeyDictionary[DataLoader[Any], Opened] = WeakKeyDictionary()
        self._seeds: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
        """Loaders whose workers the script keeps between passes: the seed of the latest workers."""
        self._copied: WeakKeyDictionary[DataLoader[Any], Watch] = WeakKeyDictionary()
        self._known_ahead: WeakKeyDictionary[DataLoader[Any], AheadOf] = WeakKeyDictionary()
        self.said: dict[str, None] = {}
        self.checks: WeakKeyDictionary[DataLoader[Any], Checks] = WeakKeyDictionary()

    def install(self) -> None:
        """Replace `DataLoader.__iter__`."""
        if self._patch is None:
            self._patch = Patch(DataLoader, "__iter__", self._observed)

    def _observed(self, original: Any, patch: Patch) -> Any:
        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            in_worker = torch.utils.data.get_worker_info() is not None
            found_by_equals = type(loader).__hash__ is not object.__hash__  # as what is known of loaders is found
            if not patch.active or in_worker or torch.compiler.is_compiling() or found_by_equals:
                return original(loader)
            observer = self.observer
            if observer is not None:
                observer.before_fetch()
            try:
                return self._pass_over(loader)
            except BaseException as problem:
                hide_ours(problem)
                raise
            finally:
                if observer is not None:
                    observer.after_fetch()

        return __iter__

    def _pass_over(self, loader: DataLoader[Any]) -> Pass:
        """A new pass; where the script keeps its workers, the one that is under way from its beginning, as plain's."""
        lasting = self._lasting.get(id(loader))
        if lasting is not None:
            self.num_passes += 1
            lasting.begin_anew()
            return lasting
        self.num_passes += loader in self._training
        new = Pass(loader, self)
        if keeps_workers(loader):
            self._lasting[id(loader)] = new
        return new

    def remove(self) -> None:
        """Give the class its own `__iter__` back; passes under way go on as they are."""
        if self._patch is not None:
            self._patch.remove()
            self._patch = None
        self.close_kept()

    @property
    def in_use(self) -> bool:
        """Whether a lever fetches, or has fetched, otherwise than the script."""
        return bool(self.settings or self.num_changed or self._parts or self._transfer)

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def training(self) -> list[DataLoader[Any]]:
        """Loaders whose batches were followed by steps, most used first.

        A script may make a new one for each pass: before the first step of such a pass, that one.
        """
        under_way = {one.loader: None for one in self.passes if one.has_given and self._feeds_training(one.loader)}
        return sorted(self._training, key=lambda loader: -self._training[loader]) or list(under_way)

    def batch_bytes(self, loader: DataLoader[Any]) -> int | None:
        """Bytes of the tensors in the first batch that was seen; None where none was, or it cannot be looked into."""
        return self._batch_bytes.get(loader)

    def note_batch(self, loader: DataLoader[Any], batch: Any) -> None:
        """A pass has given its first batch."""
        if loader in self._batch_bytes:
            return
        try:
            num_bytes = sum(t.numel() * t.element_size() for t in tensors_of(batch))
        except Exception:  # noqa: BLE001  a batch of the user's own kind may raise anything when looked into
            num_bytes = None
        self._batch_bytes[loader] = num_bytes

    def note(self, loader: DataLoader[Any], num_batches: int) -> None:
        """Steps were made with batches from `loader`."""
        seen = self._training.get(loader)  # batches before the first step that shows are not its alone
        self._training[loader] = 0 if seen is None else seen + num_batches

    def ended(self, opened: Opened, trains: bool) -> None:
        """A pass is over: workers of ours are kept for the next one where the script keeps its own, and others end.

        Those see nothing of what the script changes between passes: neither may ours, and no others may be kept.
        """
        if not trains and opened.loader not in self._training:
            self._others.add(opened.loader)
        if opened.changed and opened.settings == self.settings and keeps_workers(opened.loader):
            self._kept[opened.loader] = opened
        else:
            opened.close()

    # -- opening -------------------------------------------------------------------------------------------------

    def change(self, settings: Mapping[str, Any]) -> None:
        """Run training loaders with these worker attributes from their next pass on (in a trial: next fetch)."""
        if dict(settings) != self.settings:
            self.settings = dict(settings)
            self.close_kept()

    def set(self, **settings: Any) -> None:
        """Change these settings, and keep the others."""
        self.change({**self.settings, **settings})

    def unset(self, *names: str) -> None:
        """Leave these settings to the script again."""
        self.change({name: value for name, value in self.settings.items() if name not in names})

    def may_change(self, loader: DataLoader[Any]) -> bool:
        """Whether the script's workers can be others without asking the loader to do what it does not do."""
        return (
            self.may_open(loader)
            and loader.num_workers > 0
            and loader.multiprocessing_context is None
            and getattr(loader, "in_order", True)  # otherwise nobody knows which batches were given when one breaks
            and not isinstance(loader.dataset, IterableDataset)
            and not generators_of(loader)  # which workers would move further than the script has got
            and self._may_be_copied(loader)
        )

    def _may_be_copied(self, loader: DataLoader[Any]) -> bool:
        from flatout.frameworks.pytorch.input.reach import held_apart

        return held_apart(loader.dataset) is None

    def _check_copy(self, loader: DataLoader[Any]) -> None:
        from flatout.frameworks.pytorch.input.watch import check_copy

        check_copy(self._copied, loader)

    def may_open(self, loader: DataLoader[Any]) -> bool:
        """Whether the loader opens its passes as PyTorch's does, and in this process."""
        own = type(loader)
        usual = own.__iter__ is DataLoader.__iter__ and own._get_iterator is DataLoader._get_iterator
        # not in a process that was forked from here, to which the workers do not belong
        return usual and os.getpid() == self._pid

    def replay(self, engaged: bool) -> None:
        """Have each loader that feeds the training give one batch again and again, or what it has."""
        self.replayed = WeakKeyDictionary() if engaged else None

    def replays(self, loader: DataLoader[Any]) -> bool:
        """Whether the loader gives one batch again and again."""
        return self.replayed is not None and loader in self._training

    def _feeds_training(self, loader: DataLoader[Any]) -> bool:
        if loader in self._training:
            return True  # one in order is most often an evaluation's, for which starting workers would cost
        return loader not in self._others and not isinstance(loader.sampler, SequentialSampler)

    @property
    def parts(self) -> InputParts:
        """What computes batches otherwise than item by item; made when it is first asked for."""
        if self._parts is None:
            from flatout.frameworks.pytorch.input.items.parts import InputParts

            self._parts = InputParts(self.store_memory_bytes)
        return self._parts

    def remarks(self) -> list[str]:
        """What is to be said of workers in the end."""
        return list(self.said)

    def attach(self) -> None:
        """Have passes that are under way ask the parts of the input as well, of which a part was engaged."""
        for one in self.passes:
            if one.inner is not None:
                self.parts.attach(one.loader, one.inner)

    @property
    def transfer(self) -> Transfer:
        """What brings batches to a device; made when it is first asked for."""
        if self._transfer is None:
            from flatout.frameworks.pytorch.input.transfer.transfer import Transfer

            self._transfer = Transfer()
        return self._transfer

    def following(self, iterator: Any) -> Any:
        """The next batch of a pass's iterator."""
        return next(iterator) if self._transfer is None else self._transfer.following(iterator, next)

    @property
    def looks_at_datasets(self) -> bool:
        """Whether it may be found out what the parts of the input could do for them, which takes a while."""
        return self.studies or self._parts is not None or IN_PROCESS in self.settings

    def why_not(self, part: Callable[[InputParts], Any], loader: DataLoader[Any], *, for_workers: bool) -> str | None:
        """Why a part of the input can do nothing for a loader's batches; None where it can."""
        if not self.looks_at_datasets:
            return NOT_LOOKED_AT
        why: str | None = part(self.parts).why_not(loader, for_workers=for_workers)
        return why

    def open(self, loader: DataLoader[Any]) -> Opened:
        """A pass made under the present settings; as the script says where they do not apply, or fail."""
        if self._parts is not None:
            self._parts.decoded.before_pass()
        opened = self._open(loader)
        if self._parts is not None:
            self._parts.attach(loader, opened.iterator)
        if self._transfer is not None:
            self._transfer.attach(loader, opened.iterator)
        return self._ahead(opened)

    def why_left_to_plain(self, loader: DataLoader[Any]) -> str | None:
        """Why a loader's batches are not made ahead any more; None where they are, or it was not tried."""
        known = self._known_ahead.get(loader)
        return known.why_not or None if known is not None else None

    def _ahead(self, opened: Opened) -> Opened:
        """A pass of which batches may be made ahead."""
        loader, num = opened.loader, self.settings.get("ahead")
        if num and not opened.changed and self.may_open(loader) and self._feeds_training(loader):
            from flatout.frameworks.pytorch.input.ahead.ahead import Ahead, AheadOf, refusal

            known = self._known_ahead.get(loader)
            if known is None:
                known = self._known_ahead[loader] = AheadOf(self)
                if (why := refusal(loader)) is not None:
                    known.give_up(why)
            if not known.why_not:
                opened.iterator = Ahead(loader, opened.iterator, num, known)
        return opened

    def _open(self, loader: DataLoader[Any]) -> Opened:
        if not self.settings or loader in self._refused:
            return self.open_plain(loader)
        before = RandomStates(generators_of(loader))
        try:
            settings = self._settings_for(loader)
            if settings:
                return self._start(loader, settings, before)
        except Exception as problem:  # noqa: BLE001  a process that cannot be started must not end the training
            before.restore()
            self.refuse(loader, "engage", problem)
            let_through(problem)
        return self.open_plain(loader)

    def _settings_for(self, loader: DataLoader[Any]) -> Mapping[str, Any]:
        """What may be changed about this loader; empty where nothing."""
        settings = usable(self.settings, loader)
        if not settings or not self.may_open(loader) or is_pipe(loader):
            return {}
        if settings.get(IN_PROCESS) and self.parts.fused.why_not(loader, for_workers=True) is None:
            return settings
        if not self._feeds_training(loader) and loader not in self._kept:
            return {}
        if self.may_change(loader) and not (settings.get("num_workers") == 0 and needs_workers(loader)):
            return {name: value for name, value in settings.items() if name != IN_PROCESS}
        # how batches are handed over may still be chosen
        return {name: value for name, value in settings.items() if name == "pin_memory"}

    def open_plain(self, loader: DataLoader[Any]) -> Opened:
        """A pass as the script makes it."""
        if keeps_workers(loader) and loader not in self._refused and getattr(loader, "_iterator", None) is None:
            try:
                self._check_copy(loader)
            except RuntimeError as problem:
                self.refuse(loader, "engage", problem)
        original = self._patch.original if self._patch is not None else DataLoader.__iter__
        with self._drawing_as_plain(loader):
            iterator = original(loader)
        self._remember(loader, iterator)
        return Opened(loader, iterator, dict(self.settings))

    @contextlib.contextmanager
    def _drawing_as_plain(self, loader: DataLoader[Any]) -> Iterator[bool]:
        """Whether a seed for workers is to be drawn; plain draws one for each pass, but for kept workers only once.

        Where plain would not, the loader draws from a generator of ours.
        """
        seed = self._seeds.get(loader)
        if seed is None:
            yield True
            return
        with drawing_elsewhere(loader, seed + 1):
            yield False

    def _remember(self, loader: DataLoader[Any], iterator: Any) -> None:
        if keeps_workers(loader) and not is_pipe(loader):
            self._seeds[loader] = iterator._base_seed

    def refuse(self, loader: DataLoader[Any], stage: str, problem: BaseException) -> None:
        """The loader does not bear our settings: run it as the script does from now on."""
        self._refused.add(loader)
        if self.on_failure is not None:
            self.on_failure(stage, problem)

    def _start(self, loader: DataLoader[Any], settings: Mapping[str, Any], before: RandomStates) -> Opened:
        kept = self._kept.pop(loader, None)
        if kept is None and keeps_workers(loader):
            self._check_copy(loader)
        former = {name: getattr(loader, name) for name in WORKER_ATTRIBUTES}
        try:
            with self._drawing_as_plain(loader) as draws:
                loader.__dict__.update(wanted(former, settings))
                if kept is None:
                    iterator = self._begun(loader, settings)
                else:
                    if draws:  # workers stay, but the script's random stream must move as it does for new ones
                        draw_seed(loader)
                    iterator = kept.iterator
                    iterator._reset(loader)
        finally:
            loader.__dict__.update(former)
        self._remember(loader, iterator)
        self.num_changed += 1
        return Opened(loader, iterator, dict(self.settings), before=before)

    def _begun(self, loader: DataLoader[Any], settings: Mapping[str, Any]) -> Any:
        if not loader.num_workers:
            return loader._get_iterator()
        warned = caller_in(DataLoader._get_iterator, "self.check_worker_number_rationality()")
        warned(loader.check_worker_number_rationality)  # plain warns where there are more workers than cores
        if (fast := bool(settings.get(IN_PROCESS))) or settings.get("num_workers") == 0:
            return self.parts.in_process(loader, fast=fast)
        from flatout.frameworks.pytorch.input.worker_processes import OurWorkers

        return OurWorkers(loader)

    def close_kept(self) -> None:
        """End workers that wait for a next pass."""
        for opened in list(self._kept.values()):
            opened.close()
        self._kept.clear()
