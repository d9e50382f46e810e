"""Where do the random generators stand that items draw from, how far did they move, and how is one moved as far?

PyTorch's on the CPU, NumPy's and Python's are all MT19937: 624 words and a position among them, which are made anew
when they are used up. A dataset may hold more generators, of any kind. In: nothing, or two places. Out: places, and
numbers of 32-bit draws between them.

Source: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998).
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

NUM_WORDS, MIDDLE = 624, 397

MOST_BLOCKS = 4096
"""Draws are counted up to so many times 624: two million, about 0.1 s."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How many 32-bit numbers were drawn from PyTorch's, NumPy's and Python's generator."""

    torch: int = 0
    numpy: int = 0
    python: int = 0

    def __add__(self, other: Draws) -> Draws:
        return Draws(self.torch + other.torch, self.numpy + other.numpy, self.python + other.python)

    def times(self, num: int) -> Draws:
        """So many times as many."""
        return Draws(num * self.torch, num * self.numpy, num * self.python)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the generators stand: all of their states, so that equal places draw equal numbers.

    Attributes:
        torch: PyTorch's on the CPU.
        numpy: NumPy's; None where it is not loaded.
        python: Python's.
        own: Those that the dataset holds, of any kind.
    """

    torch: bytes
    numpy: tuple[Any, ...] | None
    python: Any
    own: tuple[bytes, ...] = ()

    @classmethod
    def now(cls, own: Sequence[Any] = ()) -> Place:
        """Here; `own`: the generators that the dataset holds."""
        numpy = sys.modules.get("numpy.random")
        drawn: Any = numpy.get_state() if numpy is not None else None
        found = None if drawn is None else (drawn[1].tobytes(), *drawn[2:])
        return cls(torch.get_rng_state().numpy().tobytes(), found, random.getstate(), tuple(map(state_of, own)))

    def put(self, own: Sequence[Any] = ()) -> None:
        """Have the generators stand here."""
        for generator, state in zip(own, self.own, strict=True):
            put_back(generator, state)
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        if self.numpy is not None:
            words, *rest = self.numpy
            np.random.set_state(("MT19937", np.frombuffer(words, dtype=np.uint32), *rest))
        random.setstate(self.python)

    def draws_to(self, later: Place) -> Draws | None:
        """What was drawn from here to there; None where it was too much, or not drawing from those of the process."""
        if self.own != later.own:
            return None
        sides = zip(self._twisters(), later._twisters(), strict=True)
        found = [_draws(one, other) for one, other in sides]
        return None if None in found else Draws(*found)  # type: ignore[arg-type]

    def _twisters(self) -> list[tuple[Words, int, Any]]:
        """Of each generator its words, how many of them are used up, and what else belongs to its state."""
        whole = np.frombuffer(self.torch, dtype=np.uint8)
        left = int(whole[8:12].view(np.int32)[0])
        words = whole[24 : 24 + 8 * NUM_WORDS].view(np.uint64).astype(np.uint32)
        found: list[tuple[Words, int, Any]] = [(words, NUM_WORDS + 1 - left, self.torch[24 + 8 * NUM_WORDS :])]
        if self.numpy is None:
            found.append((np.zeros(NUM_WORDS, np.uint32), 0, None))
        else:
            found.append((np.frombuffer(self.numpy[0], dtype=np.uint32), self.numpy[1], self.numpy[2:]))
        _, internal, gauss = self.python
        return [*found, (np.array(internal[:-1], dtype=np.uint32), internal[-1], gauss)]


def state_of(generator: Any) -> bytes:
    """Where a random generator stands."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    bits = getattr(generator, "bit_generator", generator)
    return pickle.dumps(bits.state if hasattr(bits, "state") else bits.get_state(legacy=False))


def put_back(generator: Any, state: bytes) -> None:
    """Have a generator stand there again."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        getattr(generator, "bit_generator", generator).state = pickle.loads(state)


def skip(draws: Draws) -> None:
    """Move the generators by as much."""
    if draws.torch:
        torch.empty(draws.torch, dtype=torch.int32).random_()
    if draws.numpy:
        np.random.bytes(4 * draws.numpy)
    if draws.python:
        random.getrandbits(32 * draws.python)


def _draws(one: tuple[Words, int, Any], other: tuple[Words, int, Any]) -> int | None:
    words, used, beside = one
    wanted, used_then, beside_then = other
    if beside != beside_then:  # half of a pair of normal numbers waits
        return None
    num = -used
    for _ in range(MOST_BLOCKS):
        if np.array_equal(words, wanted):
            return num + used_then if num + used_then >= 0 else None
        words, num = twisted(words), num + NUM_WORDS
    return None


def twisted(words: Words) -> Words:
    """The next 624 words.

    >>> before = Place.now(); skip(Draws(torch=1300)); before.draws_to(Place.now())
    Draws(torch=1300, numpy=0, python=0)
    """
    found = words.copy()
    mixed = (words[:-1] & np.uint32(0x80000000)) | (words[1:] & np.uint32(0x7FFFFFFF))
    turned = (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), np.uint32(0x9908B0DF), np.uint32(0))
    ahead = NUM_WORDS - MIDDLE
    found[:ahead] = words[MIDDLE:] ^ turned[:ahead]
    found[ahead : 2 * ahead] = found[:ahead] ^ turned[ahead : 2 * ahead]
    found[2 * ahead : -1] = found[ahead : MIDDLE - 1] ^ turned[2 * ahead :]
    last = (int(words[-1]) & 0x80000000) | (int(found[0]) & 0x7FFFFFFF)
    found[-1] = int(found[MIDDLE - 1]) ^ (last >> 1) ^ (0x9908B0DF if last & 1 else 0)
    return found


class Movements:
    """How far fetching a batch moves the generators, and how far the training does between two; as it was seen last."""

    def __init__(self) -> None:
        self._after: Place | None = None
        self._batches: list[Draws | None] = []
        self._gaps: list[Draws | None] = []
        self._num_needed = 1
        self.batches_differ = False
        """Whether two batches were seen to draw other numbers, however alike those are that were seen last."""

    def saw(self, before: Place | None, after: Place) -> None:
        """A batch was fetched between the two; `before` is None of one with which more than a batch was drawn."""
        if before is not None:
            if self._after is not None:
                self._gaps = [*self._gaps[-1:], self._after.draws_to(before)]
            self._batches = [*self._batches[-1:], before.draws_to(after)]
        self._after = after

    def forget(self) -> None:
        """What was seen did not hold: from now on two in a row have to be alike."""
        self._after, self._batches, self._gaps, self._num_needed = None, [], [], 2

    @property
    def batch(self) -> Draws | None:
        """Of a batch; None where two differ, or nobody knows."""
        return None if self.batches_differ else self._alike(self._batches)

    @property
    def gap(self) -> Draws | None:
        """Of the training between two."""
        return self._alike(self._gaps)

    @property
    def draws_nothing(self) -> bool:
        """Whether items draw no random number: then it does not matter what the training draws."""
        return self.batch == Draws()

    def _alike(self, seen: list[Draws | None]) -> Draws | None:
        last = seen[-self._num_needed :]
        return last[0] if len(last) == self._num_needed and all(one == last[0] for one in last) else None
