"""Which optimizer update ends a step?

A step is one period of the repeating order in which optimizers update: with one optimizer each update, with a
discriminator and a generator every second one, with five critic updates and one of the generator every sixth.
In: the identity of each optimizer as it updates. Out: whether this update ends a step. Knows nothing of PyTorch.
"""

from __future__ import annotations

REPEATS = 3
"""A period is believed when it has been seen this many times in a row."""

LONGEST = 32
"""Longest period looked for; beyond it each update of the first optimizer ends a step."""


class Rhythm:
    """Learns the period and says where it ends.

    >>> rhythm = Rhythm()
    >>> [rhythm.update(name) for name in "DGDGDGDGDG"]
    [False, False, False, False, False, True, False, True, False, True]
    """

    def __init__(self) -> None:
        self._history: list[int | str] = []
        self._period: list[int | str] = []
        self._position = 0

    @property
    def num_updates(self) -> int:
        """Updates in one step; 0 while it is being learned."""
        return len(self._period)

    def next_ends(self) -> bool:
        """Whether the next update, if the order holds, ends a step."""
        return bool(self._period) and self._position == len(self._period) - 1

    def update(self, optimizer: int | str) -> bool:
        """Note one update and say whether it ends a step; False while the period is being learned."""
        if self._period:
            if optimizer == self._period[self._position]:
                self._position = (self._position + 1) % len(self._period)
                return self._position == 0
            # Another order from here on: two models trained one after the other, or a rare extra update.
            self._period, self._position, self._history = [], 0, []
        self._history.append(optimizer)
        return self._learn()

    def _learn(self) -> bool:
        seen = self._history
        for length in range(1, min(LONGEST, len(seen) // REPEATS) + 1):
            candidate = seen[-length:]
            if seen[-length * REPEATS :] == candidate * REPEATS and self._starts_in_phase(length):
                self._period, self._position = candidate, 0
                return True
        if len(seen) > LONGEST * REPEATS:
            self._period, self._position, self._history = [seen[0]], 0, []
        return False

    def _starts_in_phase(self, length: int) -> bool:
        # The order in which the script began is the order of its step, unless it began with a prelude of its own.
        return len(self._history) % length == 0 or len(self._history) > REPEATS * length + length
