"""Which optimizer update ends a step?

A step is one period of the repeating order in which optimizers update: with one optimizer each update, with a
discriminator and a generator every second one, with five critic updates and one of the generator every sixth.
In: the identity of each optimizer as it updates. Out: whether this update ends a step. Knows nothing of PyTorch.
"""

from __future__ import annotations

REPEATS = 3
"""A period is believed when it has been seen this many times in a row."""

LONGEST = 4096
"""Longest period looked for (one optimizer for each parameter of a large model)."""

SHORT = 16
"""Every distance up to this one is followed; a longer one where an update repeated at it."""

MOST_DISTANCES = 64
"""Distances followed at once; an order that repeats has few."""

PATIENCE = 12
"""Updates for which an optimizer that exists and has not updated yet is waited for."""

GIVE_UP = 96
"""Updates without a repeating order after which each update ends a step."""

PREMATURE = 32
"""A period that held for no more updates than this was believed too early: the search goes on where it began."""


class StepPeriod:
    """Learns the period and says where it ends.

    >>> rhythm = StepPeriod()
    >>> [rhythm.update(name) for name in "DGDGDGDGDG"]
    [False, False, False, False, False, True, False, True, False, True]
    """

    def __init__(self) -> None:
        self._period: list[int | str] = []
        self._position = 0
        self._num_held = 0
        """Updates for which the period has held."""
        self._held: dict[tuple[str, ...], int] = {}
        """For each period that was believed and broke: the updates for which it held."""
        self._untold = 0
        """Updates since an order was last known."""
        self._expected = 0
        self._irregular = False
        self._num_missed = 0
        self._doubted = False
        """Whether no order was found for a while once: accidental repeats are believed less easily from then on."""
        self._forget()

    def _forget(self) -> None:
        self._history: list[int | str] = []
        """Updates since the present order began."""
        self._last_seen: dict[int | str, int] = {}
        self._widest: dict[int | str, int] = {}
        """For each optimizer: the most updates that lay between two of its own, or before its first."""
        self._runs: dict[int, int] = dict.fromkeys(range(1, SHORT + 1), 0)
        """For each distance that is followed: the length of the end of the history that repeats so."""

    @property
    def num_updates(self) -> int:
        """Updates in one step; 0 while it is being learned."""
        return len(self._period) or int(self._irregular)

    @property
    def num_missed(self) -> int:
        """Steps that were made before it was known what a step is, and of which no end was told."""
        return self._num_missed + self._untold // max(len(self._last_seen), 1)

    def expect(self, num: int) -> None:
        """So many optimizers exist: wait a little until each has updated before an order is believed."""
        self._expected = num

    @property
    def waits(self) -> bool:
        """Whether an optimizer is waited for that has not updated yet."""
        return self._expected > 1

    def next_ends(self) -> bool:
        """Whether the next update, if the order holds, ends a step."""
        if self._period:
            return self._position == len(self._period) - 1
        return self._irregular

    def update(self, optimizer: int | str) -> bool:
        """Note one update and say whether it ends a step; False while the period is being learned."""
        if self._period and optimizer != self._period[self._position]:
            self._break()
        if not self._period:
            self._untold += not self._irregular
            self._note(optimizer)
            return self._learn() or self._irregular
        self._position = (self._position + 1) % len(self._period)
        self._num_held += 1
        if self._num_held <= PREMATURE:
            self._note(optimizer)
        return self._position == 0

    def _break(self) -> None:
        """Another order from here on: believed too early, two models one after the other, or a rare extra update."""
        key = _key(self._period)
        self._held[key] = max(self._num_held, self._held.get(key, 0))
        if self._num_held > PREMATURE:
            self._forget()
        self._period, self._position, self._num_held = [], 0, 0
        self._irregular = self._doubted

    def _note(self, optimizer: int | str) -> None:
        history = self._history
        if len(history) >= 8 * LONGEST:  # an irregular script: forget, so that nothing grows
            self._forget()
            history = self._history
        former = self._last_seen.get(optimizer)
        gap = len(history) - (former if former is not None else -1)
        self._widest[optimizer] = max(gap, self._widest.get(optimizer, 0))
        self._last_seen[optimizer] = len(history)
        history.append(optimizer)
        for distance, run in self._runs.items():
            if len(history) > distance and history[-1 - distance] == optimizer:
                self._runs[distance] = (run or distance) + 1
            else:
                self._runs[distance] = 0
        if former is not None and gap <= LONGEST and gap not in self._runs:
            if len(self._runs) >= MOST_DISTANCES:
                self._runs = {d: run for d, run in self._runs.items() if run or d <= SHORT}
            if len(self._runs) < MOST_DISTANCES:
                self._runs[gap] = _run(history, gap)

    def _learn(self) -> bool:
        num = len(self._history)
        if len(self._last_seen) >= self._expected or num >= PATIENCE:
            for distance in sorted(self._runs):
                run = self._runs[distance]
                needed = max(REPEATS * distance, GIVE_UP // 2 if self._doubted else 0)
                if run >= needed and run % distance == 0 and self._is_whole(distance, run):
                    self._period, self._position, self._num_held = self._history[-distance:], 0, run
                    self._irregular, self._expected = False, 0
                    self._num_missed += max(self._untold // distance - 1, 0)
                    self._untold = 0
                    return True
        if not self._irregular and num >= max(GIVE_UP, (REPEATS + 1) * len(self._last_seen)):
            self._irregular, self._doubted, self._expected = True, True, 0
            self._num_missed, self._untold = self._num_missed + max(self._untold - 1, 0), 0
        return False

    def _is_whole(self, distance: int, run: int) -> bool:
        """Whether what repeats at this distance is the whole order, not a stretch of a longer one."""
        if any(self._runs[d] >= run for d in self._runs if d < distance and distance % d == 0):
            return False  # a shorter order repeats as long, and was not believed
        candidate = self._history[-distance:]
        if run <= 2 * self._held.get(_key(candidate), 0):
            return False
        since = {
            o: len(self._history) - 1 - last
            for o, last in self._last_seen.items()
            if last + distance < len(self._history)
        }
        return all(num > 2 * self._widest[o] for o, num in since.items())


def _run(history: list[int | str], distance: int) -> int:
    """How long the end of the history is that repeats at this distance."""
    start = len(history) - distance
    while start > 0 and history[start - 1] == history[start - 1 + distance]:
        start -= 1
    return len(history) - start


def _key(period: list[int | str]) -> tuple[str, ...]:
    """The same for every rotation of a period."""
    return tuple(sorted(map(str, period)))
