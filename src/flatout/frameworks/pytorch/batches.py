"""Does a loader under other settings give the same batches, and leave the random generators at the same place?

The first batches of a fresh pass are drawn twice plain and once under the levers, each time from the same random
states. In: a session and levers. Out: a `Difference` whose error is the share of batches that differ.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.capture import RandomStates
from flatout.frameworks.pytorch.session import Session
from flatout.trace import Difference, Levers

NUM_BATCHES = 3


def compare_batches(session: Session, levers: Levers) -> Difference | str:
    """Hashes of the main training loader's first batches, plain against `levers`; a sentence where there is none."""
    if not session.loaders.training:
        return "no training loader was seen"
    loader = session.loaders.training[0]
    start = RandomStates()
    generator = loader.generator.get_state() if loader.generator is not None else None

    def draw() -> tuple[list[str], RandomStates]:
        start.restore()
        if generator is not None:
            loader.generator.set_state(generator)
        return _first_hashes(session, loader), RandomStates()

    session.engage_exactly({})
    plain, plain_after = draw()
    again, _ = draw()
    session.engage_exactly(levers)
    changed, changed_after = draw()
    session.engage_exactly({})
    start.restore()
    if generator is not None:
        loader.generator.set_state(generator)
    return Difference(
        check="batches",
        error=_share_different(changed, plain),
        baseline_error=_share_different(again, plain),
        random_states_equal=changed_after.equals(plain_after),
        detail=f"{len(plain)} batches of `{type(loader.dataset).__name__}`",
    )


def _first_hashes(session: Session, loader: DataLoader[Any]) -> list[str]:
    iterator = session.loaders.open(loader)
    found = []
    try:
        for _ in range(NUM_BATCHES):
            found.append(digest(next(iterator)))
    except StopIteration:
        pass
    finally:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
    return found


def digest(batch: Any) -> str:
    """A hash of every value in a batch: type, shape and bytes of tensors, pickles of the rest."""
    state = hashlib.blake2b(digest_size=16)
    leaves, structure = tree_flatten(batch)
    state.update(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            state.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            state.update(raw.numpy().tobytes())
        else:
            try:
                state.update(pickle.dumps(leaf))
            except Exception:  # noqa: BLE001  a user's object may refuse in any way
                state.update(repr(type(leaf)).encode())
    return state.hexdigest()


def _share_different(found: list[str], baseline: list[str]) -> float:
    if len(found) != len(baseline) or not baseline:
        return 1.0
    return sum(a != b for a, b in zip(found, baseline, strict=True)) / len(baseline)
