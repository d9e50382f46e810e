"""Does a loader under other settings give the same batches, and leave the random generators at the same place?

The first batches of a fresh pass, or all of a short one, are drawn twice plain and twice under the levers, each time
from the same random states. In: a session and levers. Out: a `Difference` whose error is the share of batches that
differ.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import digest, tensors_of
from flatout.frameworks.pytorch.session import Session
from flatout.records.difference import Difference
from flatout.records.trace import Levers

NUM_BATCHES = 3

WHOLE_PASS_S = 1.0
"""A pass that takes no longer is drawn as a whole: what is wrong may be its last batch."""


def compare_batches(session: Session, levers: Levers) -> Difference | str:
    """Hashes of the main training loader's batches, plain against `levers`; a sentence where there is none.

    Under the levers they are drawn twice from the same random states, so that items are met again which a lever may
    have kept.
    """
    if not session.loaders.training:
        return "no training loader was seen"
    loader = session.loaders.training[0]
    start = RandomStates([loader.generator])

    def draw(wanted: Levers, num: int) -> Drawn:
        session.engage_exactly(wanted)
        start.restore()
        with _own_samplers(loader):
            return Drawn(session, loader, num, few)

    few = _num_batches(session, loader, levers)
    try:
        plain = draw({}, few)
        num = _whole_pass(loader, plain)
        if num > few:
            plain = draw({}, num)
        again, changed, met_again = draw({}, num), draw(levers, num), draw(levers, num)
    finally:
        session.engage_exactly({})
        start.restore()
    keeps = changed.shares_memory_with(met_again) and not plain.shares_memory_with(again)
    return Difference(
        check="batches",
        error=max(_share_different(one.hashes, plain.hashes) for one in (changed, met_again)),
        baseline_error=_share_different(again.hashes, plain.hashes),
        random_states_equal=changed.leaves_random_states_of(plain) and met_again.leaves_random_states_of(plain),
        fault="batches lie in memory that the lever gives out again: what a script writes there stays" if keeps else "",
        detail=f"{len(plain.hashes)} batches of `{type(loader.dataset).__name__}`",
    )


class Drawn:
    """The first batches of a pass, as hashes; the first few are kept, so that nothing else can lie where they lie."""

    def __init__(self, session: Session, loader: DataLoader[Any], num: int, few: int) -> None:
        self.num_asked = num
        self.hashes: list[str] = []
        self._kept: list[torch.Tensor] = []
        self._states: list[RandomStates] = []
        begun_s = perf_counter()
        opened = session.loaders.open(loader)
        try:
            for position in range(num):
                if position == few:
                    self._states.append(RandomStates([loader.generator]))
                batch = next(opened.iterator)
                self.hashes.append(digest(batch))
                if position < NUM_BATCHES:
                    self._kept += tensors_of(batch)
        except StopIteration:
            pass
        finally:
            if hasattr(opened.iterator, "_shutdown_workers"):
                opened.iterator._shutdown_workers()
        self.took_s = perf_counter() - begun_s
        self._states.append(RandomStates([loader.generator]))

    def leaves_random_states_of(self, other: Drawn) -> bool:
        """Whether the generators stood where they stand in another, after the first few batches and after the last."""
        return all(a.equals(b) for a, b in zip(self._states, other._states, strict=False))

    def shares_memory_with(self, other: Drawn) -> bool:
        """Whether a tensor of one lies where a tensor of the other lies."""
        places = {t.data_ptr() for t in self._kept if t.layout is torch.strided and t.numel()}
        return any(t.data_ptr() in places for t in other._kept if t.layout is torch.strided and t.numel())


def _whole_pass(loader: DataLoader[Any], drawn: Drawn) -> int:
    """As many batches as the whole pass has, and one more, where drawing them takes but a moment; else as drawn."""
    try:
        num = len(loader)
    except TypeError:
        return drawn.num_asked
    if not drawn.hashes or num * drawn.took_s / len(drawn.hashes) > WHOLE_PASS_S:
        return drawn.num_asked
    return max(num + 1, drawn.num_asked)


def _num_batches(session: Session, loader: DataLoader[Any], levers: Levers) -> int:
    """A few; all of a short loader, whose sampler workers would otherwise have brought to its end ahead of plain."""
    workers = max((int(settings.get("num", 0)) for settings in levers.values()), default=0)
    ahead = NUM_BATCHES + workers * (loader.prefetch_factor or 2)
    try:
        num = len(loader)
    except TypeError:
        return NUM_BATCHES
    return num + 1 if num <= ahead else NUM_BATCHES


@contextlib.contextmanager
def _own_samplers(loader: DataLoader[Any]) -> Iterator[None]:
    """Samplers that remember something are drawn from as they are now, and the script's own workers are not touched."""
    attributes = loader.__dict__
    memo = {id(value): value for value in (loader.dataset, loader.generator) if value is not None}
    kept = {name: attributes.get(name) for name in ("sampler", "batch_sampler", "_iterator", "persistent_workers")}
    try:
        sampler, batch_sampler = copy.deepcopy((loader.sampler, loader.batch_sampler), memo)
        attributes.update(sampler=sampler, batch_sampler=batch_sampler)
    except Exception:  # noqa: BLE001  a user's sampler may refuse in any way: then it moves on, and the check says so
        attributes.update(kept)
    attributes.update(_iterator=None, persistent_workers=False)
    try:
        yield
    finally:
        attributes.update(kept)


def _share_different(found: list[str], baseline: list[str]) -> float:
    if len(found) != len(baseline) or not baseline:
        return 1.0
    return sum(a != b for a, b in zip(found, baseline, strict=True)) / len(baseline)
