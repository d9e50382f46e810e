"""What does the script's `for` loop over a loader get? Batches, from whatever fetches them at present.

A `Pass` stands between the loop and the loader's own iterator: it tells of fetches, opens again when worker settings
change in a trial, starts over instead of ending, can hand out one cached batch (a counterfactual), and goes on as
plain where changed workers break. In: a loader and its owner. Out: batches in the script's own order.
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.plain_iterator import Opened, given_back
from flatout.guest.interruptions import is_interruption
from flatout.guest.tracebacks import hide_ours


class Pass:
    """One pass over a loader, as the script's `for` loop sees it; `owner`: the `Loaders` that it is one of."""

    def __init__(self, loader: DataLoader[Any], owner: Any) -> None:
        self._owner = owner
        self._loader = loader
        self._open()
        self._num_untold = 0
        """Batches drawn of which it is not known yet whether a step follows."""
        self._cached: list[Any] = []
        self._num_steps_before = owner.num_steps
        self.trains = False
        owner.passes.add(self)

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while being copied
            raise AttributeError(name)
        return getattr(self._inner, name)

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
            return self._fetch()
        except StopIteration:
            raise
        except BaseException as problem:
            hide_ours(problem)
            raise
        finally:
            if observer is not None:
                observer.after_fetch()

    def begin_anew(self) -> None:
        """Give the first batch again next, to everybody who has this pass."""
        self._owner.ended(self._opened, self.trains)
        self._open()

    @property
    def loader(self) -> DataLoader[Any]:
        """Whose pass it is."""
        return self._loader

    @property
    def inner(self) -> Any:
        """What fetches at present."""
        return self._inner

    def _fetch(self) -> Any:
        owner = self._owner
        if self.trains:
            if owner.reopen and self._opened.settings != owner.settings:
                self._opened.close()
                self._open()
            if owner.replay_batch:
                if not self._cached:
                    self._cached = [self._draw()]
                return tree_map(lambda leaf: leaf, self._cached[0])  # new containers: the script may take them apart
            self._cached = []
        return self._draw()

    def _draw(self) -> Any:
        while True:
            try:
                batch = self._compared(self._opened.iterator)
                break
            except StopIteration:
                is_over = True
            except Exception as problem:
                if not self._opened.changed or is_interruption(problem):
                    raise
                is_over = False
                self._owner.refuse(self._loader, "step", problem)
            # not while that is handled: workers that are forked then would tell of it with whatever they raise
            if not is_over:
                self._go_on_plain()
            elif not self._start_over():
                raise StopIteration
        if not self._num_drawn:
            self._owner.note_batch(self._loader, batch)
        self._num_drawn += 1
        self._num_untold += 1
        return batch

    def _compared(self, iterator: Any) -> Any:
        """The next batch of the iterator, which is plain's."""
        batch = self._owner.following(iterator)
        if self._check is not None:
            self._check.compare(batch, self._num_drawn)
        return batch

    def _start_over(self) -> bool:
        """The pass has come to its end; whether another has begun in its place."""
        owner = self._owner
        owner.ended(self._opened, self.trains)
        if not (owner.endless and self.trains and self._num_drawn):
            return False
        owner.num_restarts += 1
        self._open()
        return True

    def _open(self) -> None:
        self._opened = self._owner.open(self._loader)
        self._inner = self._opened.iterator
        self._check = _check_of(self._owner, self._opened)
        self._num_drawn = 0
        """Batches drawn since the pass was last opened."""

    def _go_on_plain(self) -> None:
        """Put the script's own iterator in place of ours, in the same order and at the same batch."""
        self._opened = given_back(self._owner.open_plain, self._opened, self._num_drawn)
        self._inner = self._opened.iterator
        self._check = None


def _check_of(owner: Any, opened: Opened) -> Any:
    """What sees that workers of ours give what plain would; None where there are none of ours."""
    if not opened.changed or not opened.settings.get("num_workers"):
        return None
    from flatout.frameworks.pytorch.input.worker_check import Check, Checks

    known = owner.checks.get(opened.loader) or owner.checks.setdefault(
        opened.loader, Checks(owner.said, owner.admits_random)
    )
    return Check(known, opened)
