"""What does measuring a set of levers take, and how much of it fits? In windows, processes, or whole starts on ranks.

In: a bench with the step time and the starts seen so far, a budget, levers. Out: seconds, and numbers of pairs.
"""

from __future__ import annotations

from flatout.frameworks.lever import ranks_of
from flatout.judge import stats
from flatout.records.trace import Levers
from flatout.trials.bench import Bench
from flatout.trials.budget import Budget
from flatout.trials.starts import Starts

PROCESS_WINDOW_S = 2.0
"""Aimed length of a window for which a process was started; half as long as starting it took, where that is more."""


class Costs:
    """Of one script under measurement."""

    def __init__(self, bench: Bench, starts: Starts, budget: Budget) -> None:
        self._bench, self._starts, self._budget = bench, starts, budget

    def apart(self, levers: Levers) -> Levers:
        """Those that need a process of their own."""
        return {n: s for n, s in levers.items() if self._bench.levers[n].toggles == "process"}

    def togglable(self, levers: Levers) -> Levers:
        """The others."""
        return {n: s for n, s in levers.items() if self._bench.levers[n].toggles != "process"}

    def starts_anew(self, levers: Levers) -> bool:
        """Whether a set runs on ranks, which are started whole each time."""
        return ranks_of(levers, self._bench.levers) is not None

    def pair_s(self, levers: Levers) -> float:
        """Seconds that a pair takes."""
        bench = self._bench
        if self.starts_anew(levers):
            return self._starts.pair_s(levers, bench.step_guess_s)
        pair_s = bench.pair_s(bench.size.skipped({}, levers, bench.levers))
        if self.apart(levers):
            pair_s += 2 * (bench.start_s or 3.0) + 2 * self.process_steps() * bench.step_guess_s
        return pair_s

    def process_steps(self) -> int:
        """Steps of a window for which a process was started: so many that starting it pays."""
        size, aimed_s = self._bench.size, max(PROCESS_WINDOW_S, (self._bench.start_s or 0.0) / 2)
        return size.num_steps * max(round(aimed_s / (size.num_steps * self._bench.step_guess_s)), 1)

    def affordable(self, most: int, share: float, levers: Levers, least: int = stats.MIN_PAIRS) -> int:
        """Pairs, from `least` to `most`, that fit into a share of the budget."""
        return max(min(most, int(share * self._budget.total_s / self.pair_s(levers))), least)
