"""What does each lever bring? A model of the step time that learns from every window, whichever levers it ran under.

In: levers with their settings, then the step times of windows under sets of them. Out: the set that the next window
should run under, the set that is most likely the fastest, and what a set brings, with an interval. Nothing here
measures.

The logarithm of a step time is a sum of what each lever brings, what each pair of levers brings beyond that, a
remainder of each set, what others on the machine take, a drift from window to window, and noise. All of these are
normal, so that what is known after each window has a closed form. The first sets are drawn by lot among those that tell
most, like a fractional factorial design; then sets are drawn in turn as often as they may be the fastest (top-two
Thompson sampling), so that windows go where the question is still open.

Source: Box, Hunter, Hunter, "Statistics for experimenters" (2005), chapter 6; Russo, "Simple Bayesian algorithms for
best-arm identification" (2020); Wilson et al., "Efficiently sampling functions from Gaussian process posteriors"
(2020), whose rule by Matheron draws from what is known without its covariance.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flatout.records.trace import Levers, Setting

Array = NDArray[np.float64]

Option = tuple[str, tuple[tuple[str, Setting], ...]]
"""A lever with one setting."""

OWN_SD, PAIR_SD, PARTNERS_SD, SET_SD = 0.4, 0.2, 0.4, 0.04
"""How much levers, pairs, pairs of partners and sets may bring, as standard deviations of the logarithm."""

DISTURBED_SD = 1.0
"""How much longer a step takes, as a logarithm, while others have all of the CPU; as a standard deviation."""

NOISES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
"""The noise of a window is the likeliest of these."""

USUAL_NOISE = 0.03
"""What it was on shared machines, within a factor of two."""

DRIFTS, REMEMBERED = (0.5, 2.0), 0.9
"""What comes to the machine's drift from window to window is one of these times the noise; what is left of it."""

FIRST_WINDOWS = 8
"""So many are drawn for what they tell, before any is drawn for being fast."""

WORTH_ADDING = 0.01
"""What a lever must bring, as a logarithm, to be worth its place in a set."""

SLACK = 0.02
SURE = 0.9
"""A set is known to be the best where it is so likely that none is faster by more than `SLACK`."""

MOST_SETS = 1024
DRAWS = 128

ALL_PAIRS = 14
"""Of more levers only partners are taken to bring something together beyond what each brings."""

LIKELY = 0.8
"""A lever has its place in the best set where it is so likely to be worth it."""


class Effects:
    """What is known of the sets of some levers.

    Args:
        singles: Levers, each with one setting; several settings of a lever exclude each other.
        fits: Whether a set may be engaged.
        are_partners: Whether two levers may gain together what neither gains alone.
        lots: Draws the sets.
    """

    def __init__(
        self,
        singles: Sequence[Levers],
        fits: Callable[[Levers], bool],
        are_partners: Callable[[Levers, Levers], bool],
        lots: random.Random,
    ) -> None:
        self._fits, self._lots = fits, lots
        self._random = np.random.default_rng(lots.randrange(2**32))
        self._options = [_option(single) for single in singles]
        names = [name for name, _ in self._options]
        both = [(i, j) for i, j in itertools.combinations(range(len(singles)), 2) if names[i] != names[j]]
        partners = {(i, j) for i, j in both if are_partners(singles[i], singles[j])}
        self._pairs = both if len(singles) <= ALL_PAIRS else sorted(partners)
        pair_sd = [PARTNERS_SD if pair in partners else PAIR_SD for pair in self._pairs]
        self._prior = np.array([1.0] + [OWN_SD] * len(singles) + pair_sd) ** 2
        self._sets: list[frozenset[int]] = []
        self._numbers: dict[frozenset[int], int] = {}
        self._features = np.empty((0, len(self._prior)))
        self._dropped: list[frozenset[int]] = []
        self._allowed: list[bool] = []
        self._fill()
        self._seen: list[int] = []
        """The set of each window."""
        self._logs: list[float] = []
        self._disturbed: list[float] = []
        self._challenger: int | None = None
        self.noise = NOISES[2]

    # -- the sets --------------------------------------------------------------------------------------------------

    def _members(self, levers: Levers) -> frozenset[int]:
        return frozenset(self._options.index(_option({name: settings})) for name, settings in levers.items())

    def _levers(self, number: int) -> dict[str, dict[str, Setting]]:
        return {self._options[i][0]: dict(self._options[i][1]) for i in sorted(self._sets[number])}

    def _add(self, found: Iterable[frozenset[int]]) -> None:
        """Take those of some sets into account that are new and can be engaged."""
        rows = []
        for members in found:
            names = [self._options[i][0] for i in members]
            if members in self._numbers or len({*names}) < len(names):
                continue
            if members and not self._fits({self._options[i][0]: dict(self._options[i][1]) for i in members}):
                continue
            self._numbers[members] = len(self._sets)
            self._sets.append(members)
            own = [float(i in members) for i in range(len(self._options))]
            rows.append([1.0, *own, *(own[i] * own[j] for i, j in self._pairs)])
        if rows:
            self._features = np.vstack([self._features, rows])

    def _fill(self) -> None:
        """All sets, or where there are too many, singles and some by lot; what is near the best comes in later."""
        self._add([frozenset(), *(frozenset([i]) for i in range(len(self._options)))])
        by_name: dict[str, list[int | None]] = {}
        for i, (name, _) in enumerate(self._options):
            by_name.setdefault(name, [None]).append(i)
        drawn: Iterable[tuple[int | None, ...]] = itertools.product(*by_name.values())
        if math.prod(len(some) for some in by_name.values()) > MOST_SETS:
            drawn = (tuple(self._lots.choice(some) for some in by_name.values()) for _ in range(MOST_SETS))
        self._add(frozenset(i for i in chosen if i is not None) for chosen in drawn)

    def _add_neighbours(self, number: int) -> None:
        """Sets that differ in one lever from one that may be the best."""
        members = self._sets[number]
        if len(self._sets) < 2 * MOST_SETS:
            without = ({j for j in members if self._options[j][0] != name} for name, _ in self._options)
            self._add(frozenset(rest if i in members else rest | {i}) for i, rest in enumerate(without))

    def _may(self) -> NDArray[np.bool_]:
        """Which sets are left."""
        new = self._sets[len(self._allowed) :]
        self._allowed += [not any(part <= members for part in self._dropped) for members in new]
        return np.array(self._allowed)

    def _left(self, logs: Array) -> Array:
        """Logarithms of all sets, of which a larger one must earn its size, and none is chosen that is out."""
        return np.where(
            self._may(), logs + WORTH_ADDING * self._features[:, 1 : 1 + len(self._options)].sum(axis=1), math.inf
        )

    def drop(self, levers: Levers) -> None:
        """Leave out every set that contains these levers: they broke, took no effect, or their numbers disagree."""
        self._dropped.append(self._members(levers))
        self._allowed = []

    # -- what is known ---------------------------------------------------------------------------------------------

    def saw(self, levers: Levers, step_s: float, disturbed: float = 0.0) -> None:
        """A window was measured.

        Args:
            levers: What it ran under; a set that was proposed, or any other of the same levers.
            step_s: Its step time, seconds, above 0.
            disturbed: The share of the CPU that others took: what that costs is learned, and it counts for less.
        """
        members = self._members(levers)
        self._add([members])
        self._seen.append(self._numbers[members])
        self._logs.append(math.log(step_s))
        self._disturbed.append(disturbed)
        self._learn()

    @property
    def num_windows(self) -> int:
        """Windows that were seen."""
        return len(self._seen)

    def _learn(self) -> None:
        """Find the likeliest noise, and what is known with it."""
        seen, logs = self._features[self._seen], np.array(self._logs)
        self._centre = float(np.median(logs))
        y = logs - self._centre
        same = np.equal.outer(self._seen, self._seen)
        far = np.abs(np.subtract.outer(np.arange(len(y)), np.arange(len(y))))
        self._others = DISTURBED_SD * np.array(self._disturbed)
        explained = (seen * self._prior) @ seen.T + SET_SD**2 * same + np.outer(self._others, self._others)
        likeliest = -math.inf
        spread = 1.0 + (np.array(self._disturbed) / 0.05) ** 3
        for noise, drifting in itertools.product(NOISES, DRIFTS):
            weights = spread
            for _ in range(3):  # noise with heavy tails: a burst that fell into a window counts for less
                drift = (drifting * noise) ** 2 * REMEMBERED**far
                own = drift + np.diag(noise**2 * weights)
                lower = np.linalg.cholesky(explained + own)
                solved = np.linalg.solve(lower.T, np.linalg.solve(lower, y))
                residual = (noise**2 * weights * solved) ** 2 / (noise**2 * weights)
                weights = spread * (5.0 + residual) / 5.0 if len(y) >= 4 else spread
            unusual = (math.log(noise) - math.log(USUAL_NOISE)) / 0.7  # few windows alone would fit themselves
            fit = float(-0.5 * y @ solved - np.log(np.diag(lower)).sum()) - 0.5 * unusual**2
            if fit > likeliest:
                likeliest, self.noise = fit, noise
                self._lower, self._solved, self._noise = lower, solved, np.linalg.cholesky(own)
        self._weights = self._prior * (seen.T @ self._solved)

    def _means(self) -> Array:
        """The expected logarithm of every set."""
        means: Array = self._features @ self._weights
        np.add.at(means, self._seen, SET_SD**2 * self._solved)
        return means

    def _drawn(self, num: int) -> Array:
        """So many draws from what is known, one in a row: the logarithm of every set."""
        seen = self._features[self._seen]
        weights = self._random.standard_normal((num, len(self._prior))) * np.sqrt(self._prior)
        visited = sorted({*self._seen})
        column = {number: i for i, number in enumerate(visited)}
        belongs = np.array([column[n] for n in self._seen])
        own = SET_SD * self._random.standard_normal((num, len(visited)))
        noise = self._random.standard_normal((num, len(self._seen))) @ self._noise.T
        noise += np.outer(self._random.standard_normal(num), self._others)
        missed = (np.array(self._logs) - self._centre) - weights @ seen.T - own[:, belongs] - noise
        solved = np.linalg.solve(self._lower.T, np.linalg.solve(self._lower, missed.T)).T
        weights = weights + (solved @ seen) * self._prior
        found: Array = weights @ self._features.T
        of_set = np.zeros((len(self._seen), len(visited)))
        of_set[np.arange(len(self._seen)), belongs] = 1.0
        found[:, visited] += own + SET_SD**2 * (solved @ of_set)
        return found

    # -- what follows ----------------------------------------------------------------------------------------------

    def next(self) -> dict[str, dict[str, Setting]]:
        """The set that the next window should run under."""
        may = self._may()
        if not self._seen:
            return {}
        if len(self._seen) < FIRST_WINDOWS:
            left = [int(n) for n in np.flatnonzero(may) if n not in self._seen] or [0]
            some = self._lots.sample(left, min(16, len(left)))
            drawn = self._drawn(DRAWS)
            spread = {number: float((drawn[:, number] - drawn[:, 0]).std()) for number in some}
            return self._levers(max(some, key=lambda number: spread[number]))
        self._add_neighbours(self._best())
        if self._challenger is not None and self._may()[self._challenger]:
            number, self._challenger = self._challenger, None
            return self._levers(number)
        first, *others = (int(n) for n in self._left(self._drawn(16)).argmin(axis=1))
        self._challenger = next((n for n in others if n != first), None)
        return self._levers(first)

    def _best(self) -> int:
        return int(self._left(self._means()).argmin())

    def _chosen(self, drawn: Array) -> int:
        """The best, without what is not likely to be worth its place."""
        number = self._best()
        while True:
            members, least, weakest = self._sets[number], LIKELY, None
            smaller = [members - {i} for i in members]
            self._add(smaller)
            for part in (self._numbers[one] for one in smaller if self._numbers.get(one, math.inf) < drawn.shape[1]):
                likely = float((drawn[:, part] - drawn[:, number] > WORTH_ADDING).mean())
                if likely < least:
                    least, weakest = likely, part
            if weakest is None:
                return number
            number = weakest

    def best(self) -> dict[str, dict[str, Setting]]:
        """The set that is expected to be the fastest, without levers that are not likely to be worth their place."""
        return self._levers(self._chosen(self._drawn(4 * DRAWS)))

    def gain(self) -> float:
        """How many times as fast as plain the best set should be; 1 where nothing is known."""
        if not self._seen:
            return 1.0
        means = self._means()
        return math.exp(float(means[0] - means[self._chosen(self._drawn(DRAWS))]))

    def is_settled(self) -> bool:
        """Whether the best is known well enough to be measured beside plain."""
        if len(self._seen) < FIRST_WINDOWS:
            return False
        drawn = self._drawn(2 * DRAWS)
        chosen = self._chosen(drawn)
        if drawn.shape[1] < len(self._sets):  # choosing has met further sets
            drawn = self._drawn(DRAWS)
        left = self._left(drawn)
        near = left[:, chosen] <= left.min(axis=1) + SLACK
        return bool(near.mean() >= SURE)

    def brings(self, levers: Levers) -> tuple[float, float, float]:
        """How many times as fast a set is as plain, with its 95 % interval."""
        self._add([self._members(levers)])
        drawn = self._drawn(4 * DRAWS)
        logs = drawn[:, 0] - drawn[:, self._numbers[self._members(levers)]]
        low, middle, high = np.quantile(logs, [0.025, 0.5, 0.975])
        return math.exp(middle), math.exp(low), math.exp(high)


def _option(single: Levers) -> Option:
    ((name, settings),) = single.items()
    return name, tuple(sorted(settings.items()))
