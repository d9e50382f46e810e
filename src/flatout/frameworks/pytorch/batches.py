"""Does a loader under other settings give the same batches, and leave the random generators at the same place?

The first batches of a fresh pass are drawn twice plain and once under the levers, each time from the same random
states. In: a session and levers. Out: a `Difference` whose error is the share of batches that differ.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.random_states import RandomStates
from flatout.frameworks.pytorch.session import Session
from flatout.frameworks.pytorch.trees import MAX_DEPTH, parts_of
from flatout.trace import Difference, Levers

NUM_BATCHES = 3


def compare_batches(session: Session, levers: Levers) -> Difference | str:
    """Hashes of the main training loader's first batches, plain against `levers`; a sentence where there is none."""
    if not session.loaders.training:
        return "no training loader was seen"
    loader = session.loaders.training[0]
    start = RandomStates([loader.generator])
    num = _num_batches(session, loader, levers)

    def draw(wanted: Levers) -> tuple[list[str], RandomStates]:
        session.engage_exactly(wanted)
        start.restore()
        with _own_samplers(loader):
            return _first_hashes(session, loader, num), RandomStates([loader.generator])

    try:
        plain, plain_after = draw({})
        again, _ = draw({})
        changed, changed_after = draw(levers)
    finally:
        session.engage_exactly({})
        start.restore()
    return Difference(
        check="batches",
        error=_share_different(changed, plain),
        baseline_error=_share_different(again, plain),
        random_states_equal=changed_after.equals(plain_after),
        detail=f"{len(plain)} batches of `{type(loader.dataset).__name__}`",
    )


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


def _first_hashes(session: Session, loader: DataLoader[Any], num: int) -> list[str]:
    opened = session.loaders.open(loader)
    found = []
    try:
        for _ in range(num):
            found.append(digest(opened.following(next)))
    except StopIteration:
        pass
    finally:
        if hasattr(opened.iterator, "_shutdown_workers"):
            opened.iterator._shutdown_workers()
    return found


def digest(batch: Any) -> str:
    """A hash of every value in a batch: type, shape and bytes of tensors and arrays, pickles of the rest."""
    state = hashlib.blake2b(digest_size=16)
    _add(state, batch, 0)
    return state.hexdigest()


def _add(state: Any, value: Any, depth: int) -> None:
    state.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype} {tuple(value.shape)}".encode())
        dense = value.detach().cpu() if value.layout is torch.strided else value.detach().cpu().to_dense()
        state.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "__array_interface__"):
        state.update(f"{value.dtype} {value.shape}".encode())
        state.update(value.tobytes() if value.dtype.kind != "O" else pickle.dumps(value.tolist()))
    elif depth < MAX_DEPTH and (parts := list(parts_of(value))):
        for key, part in parts:
            state.update(repr(key).encode())
            _add(state, part, depth + 1)
    else:
        try:
            state.update(pickle.dumps(value))
        except Exception:  # noqa: BLE001  a user's object may refuse in any way
            return


def _share_different(found: list[str], baseline: list[str]) -> float:
    if len(found) != len(baseline) or not baseline:
        return 1.0
    return sum(a != b for a, b in zip(found, baseline, strict=True)) / len(baseline)
