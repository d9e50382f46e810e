"""Where does every random generator stand? PyTorch's, Python's, and NumPy's where it is loaded.

In: nothing, or generators of the script's own. Out: a snapshot that can be restored and compared.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable

import torch


class TorchStates:
    """PyTorch's own generators as they stand now, those that dropout draws from: kept within a microsecond."""

    def __init__(self) -> None:
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put them back here."""
        torch.set_rng_state(self._host)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)


class RandomStates:
    """All generators as they stand now.

    >>> before = RandomStates()
    >>> _ = torch.rand(3); before.equals(RandomStates())
    False
    >>> before.restore(); before.equals(RandomStates())
    True
    """

    def __init__(self, generators: Iterable[torch.Generator | None] = ()) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = pickle.dumps(numpy.random.get_state(legacy=False)) if numpy is not None else None
        self.own = [(g, g.get_state()) for g in generators if g is not None]

    def restore(self) -> None:
        """Put every generator back here."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(pickle.loads(self.numpy))
        for generator, state in self.own:
            generator.set_state(state)

    def equals(self, other: RandomStates) -> bool:
        """Whether all generators stand at the same place."""
        if not torch.equal(self.torch, other.torch) or self.python != other.python:
            return False
        pairs = [*zip(self.cuda, other.cuda, strict=False)]
        pairs += [(a, b) for (_, a), (_, b) in zip(self.own, other.own, strict=False)]
        if any(not torch.equal(a, b) for a, b in pairs):
            return False
        return self.numpy is None or other.numpy is None or self.numpy == other.numpy
