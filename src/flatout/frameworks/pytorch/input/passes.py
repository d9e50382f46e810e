"""What does the script's `for` loop over a loader get? Batches, from whatever fetches them at present.

A `Pass` stands between the loop and the loader's own iterator: it tells of fetches, opens again when worker settings
change in a trial, can hand out one cached batch (a counterfactual), and goes on as plain where changed workers break.
In: a loader and its owner. Out: as many batches as the loader has, in the script's own order.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from flatout.frameworks.pytorch.input.plain_iterator import Opened, given_back
from flatout.guest.interruptions import is_interruption
from flatout.guest.tracebacks import hide_ours

OF_KNOWN_LENGTH = (RandomSampler, SequentialSampler)


class Pass:
    """One pass over a loader, as the script's `for` loop sees it; `owner`: the `Loaders` that it is one of.

    It has as many batches as the loader has, whatever fetches them and however often that changes meanwhile.
    """

    def __init__(self, loader: DataLoader[Any], owner: Any) -> None:
        self._owner = owner
        self._loader = loader
        self.opened: Opened | None
        """What fetches at present; None while nothing has to."""
        self._begin()
        self._num_untold = 0
        """Batches given of which it is not known yet whether a step follows."""
        self._num_steps_before = owner.num_steps
        self.trains = False
        owner.passes.add(self)

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._at_present().iterator)

    def __getattr__(self, name: str) -> Any:
        if name == "opened":  # while being copied
            raise AttributeError(name)
        return getattr(self._at_present().iterator, name)

    def __next__(self) -> Any:
        owner = self._owner
        if owner.on_fetch is not None:
            owner.on_fetch()
        if self._num_untold and owner.num_steps > self._num_steps_before:
            self.trains = True
        self._num_steps_before = owner.num_steps
        if self.trains:
            owner.note(self._loader, self._num_untold)
            self._num_untold = 0
        observer = owner.observer
        if observer is not None:
            observer.before_fetch()
        try:
            batch = self._fetch()
        except StopIteration:
            if self.trains and owner.on_pass_end is not None:
                owner.on_pass_end()
            raise
        except BaseException as problem:
            hide_ours(problem)
            raise
        finally:
            if observer is not None:
                observer.after_fetch()
        self._num_given += 1
        self._num_untold += 1
        if self.trains and self._num_given == self._smaller_at and not owner.replays(self._loader):
            owner.num_smaller += 1
        return batch

    def begin_anew(self) -> None:
        """Give the first batch again next, to everybody who has this pass."""
        self._end()
        self._begin()

    @property
    def loader(self) -> DataLoader[Any]:
        """Whose pass it is."""
        return self._loader

    @property
    def has_given(self) -> bool:
        """Whether it has given a batch."""
        return self._num_given > 0

    @property
    def inner(self) -> Any:
        """What fetches at present, or None."""
        return self.opened.iterator if self.opened is not None else None

    def _at_present(self) -> Opened:
        if self.opened is None:
            self._open()
            assert self.opened is not None
        return self.opened

    def _begin(self) -> None:
        self.opened, self._num_given = None, 0
        self._num_drawn = 0
        """Batches drawn since the pass was last opened."""
        self._most: float | None = None
        """So many batches it has, where not one iterator gives them all; None where that says when it ends."""
        self._smaller_at = smaller_at(self._loader) if self._owner.studies else None  # asks the dataset how long it is
        if not self._owner.replays(self._loader):
            self._open()

    def _end(self) -> None:
        if self.opened is not None:
            self._owner.ended(self.opened, self.trains)

    def _fetch(self) -> Any:
        owner, opened = self._owner, self.opened
        if self._most is not None and self._num_given >= self._most:
            self._end()
            self.opened = None  # whose workers have batches left
            raise StopIteration
        if owner.replays(self._loader):
            self._is_of_parts()
            if self._loader not in owner.replayed:
                owner.replayed[self._loader] = self._draw()
            batch = owner.replayed[self._loader]
            return tree_map(lambda leaf: leaf, batch)  # new containers: the script may take them apart
        if self.trains and owner.reopen and opened is not None and opened.settings != owner.settings:
            self._is_of_parts()
            opened.close()
            self._open()
        return self._draw()

    def _is_of_parts(self) -> None:
        """More than one iterator gives the batches, or none: they are counted."""
        if self._most is None:
            try:
                self._most = len(self._loader)
            except Exception:  # noqa: BLE001  how many there are, only its iterator knows; a sampler may raise anything
                self._most = math.inf

    def _draw(self) -> Any:
        while True:
            opened = self._at_present()
            try:
                batch = self._compared(opened)
                break
            except StopIteration:
                self._end()
                raise
            except Exception as problem:
                if not opened.changed or is_interruption(problem):
                    raise
                self._owner.refuse(self._loader, "step", problem)
            # In the same order and at the same batch. Not while that is handled: workers that are forked then would
            # tell of it with whatever they raise.
            self.opened = given_back(self._owner.open_plain, opened, self._num_drawn)
        if not self._num_drawn:
            self._owner.note_batch(self._loader, batch)
        self._num_drawn += 1
        return batch

    def _open(self) -> None:
        self.opened = self._owner.open(self._loader)
        self._num_drawn = 0

    def _compared(self, opened: Opened) -> Any:
        """The next batch, which is plain's."""
        batch = self._owner.following(opened.iterator)
        if opened.changed and opened.settings.get("num_workers") and not self._num_drawn:
            from flatout.frameworks.pytorch.input.worker_check import Checks, compare_first

            owner = self._owner
            known = owner.checks.get(opened.loader) or Checks(owner.said, owner.admits_random)
            compare_first(owner.checks.setdefault(opened.loader, known), opened, batch)
        return batch


def smaller_at(loader: DataLoader[Any]) -> int | None:
    """After how many batches comes one that is smaller than the others, as far as PyTorch's own sampler says.

    >>> smaller_at(DataLoader(range(10), batch_size=4)), smaller_at(DataLoader(range(8), batch_size=4))
    (3, None)
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or batches.drop_last or not isinstance(batches.sampler, OF_KNOWN_LENGTH):
        return None
    try:
        whole, rest = divmod(len(batches.sampler), batches.batch_size)
    except Exception:  # noqa: BLE001  the dataset's own code
        return None
    return whole + 1 if rest and whole else None
