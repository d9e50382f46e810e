"""What is known of one way to divide a script over ranks while it is tried, and is it worth another run?

In: the step times of its runs beside those of one process. Out: a `RankTrial`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flatout.judge import rank_tuning, stats
from flatout.judge.rank_tuning import HOPELESS_ROUNDS, RankTrial, is_hopeless
from flatout.records.ranks import SUM_OF_GRADIENTS, SUM_OVER_GROUPS
from flatout.records.trace import Levers
from flatout.trials.pairs import Pairs
from flatout.trials.samples_of_runs import Sample


@dataclass(slots=True)
class Division:
    """One candidate on its way."""

    num_ranks: int
    mode: str
    trial: RankTrial
    pairs: Pairs = field(default_factory=Pairs)
    """Beside one process."""
    gains: Pairs = field(default_factory=Pairs)
    """Beside the same without its last lever."""
    samples: list[Sample] = field(default_factory=list)
    is_open: bool = True
    took_s: float = 0.0
    base: Division | None = None
    """The same without its last lever."""

    @classmethod
    def of(cls, num_ranks: int, mode: str) -> Division:
        """One of which nothing is known."""
        return cls(num_ranks, mode, RankTrial(num_ranks=num_ranks, mode=mode, outcome="inconclusive"))

    def under(self, levers: Levers) -> Division:
        """The same under one lever more."""
        trial = RankTrial(
            num_ranks=self.num_ranks, mode=self.mode, outcome="inconclusive", levers={**self.trial.levers, **levers}
        )
        return Division(self.num_ranks, self.mode, trial, base=self)

    @property
    def label(self) -> str:
        """What it is called."""
        return self.trial.label

    @property
    def sums_share(self) -> float | None:
        """Share of training that nothing hid of the sums of gradients, median over runs; None where nobody knows."""
        kinds = [one.exchanges.kinds for one in self.samples if one.exchanges is not None]
        shares = [sum(found.get(name, 0.0) for name in (SUM_OF_GRADIENTS, SUM_OVER_GROUPS)) for found in kinds]
        return stats.summarize(shares).median if shares else None


def timed(division: Division) -> RankTrial:
    """Its trial with what its runs took so far: a ratio with its interval, or with its range where they are few."""
    pairs = division.pairs
    compared = pairs.compare()
    summary = stats.summarize(pairs.candidate_s)
    ratio, low, high = pairs.ratio()
    own = (division.trial.outcome, division.trial.reason)
    outcome, reason = own if division.trial.outcome == "failed" else (compared.verdict, compared.reason)
    shares = [s.exchanges.least_share for s in division.samples if s.exchanges is not None]
    peaks = [s.peak_memory_bytes for s in division.samples if s.peak_memory_bytes is not None]
    return replace(
        division.trial,
        outcome=outcome,
        reason=reason,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        num_pairs=len(pairs.ratios),
        step_s=summary.median,
        spread_fraction=summary.spread_fraction if summary.num > 1 else math.nan,
        peak_memory_bytes=max(peaks, default=None),
        exchanges_share=stats.summarize(shares).median if shares else None,
        exchange_shares=_shares([s.exchanges.kinds for s in division.samples if s.exchanges is not None]),
        baseline_step_s=tuple(pairs.baseline_s),
        candidate_step_s=tuple(pairs.candidate_s),
    )


def leave_slower(divisions: Sequence[Division]) -> None:
    """Closes each division that cannot be chosen any more, with its reason.

    Either another one has won, and this one surely is slower than that; or it was hopelessly slow from the start, where
    another one is not (so that one of them is measured to the end, whatever comes of it).
    """
    best = rank_tuning.best_of([d.trial for d in divisions if not d.is_open])
    worst_of = {id(d): min(d.pairs.ratios, default=0.0) for d in divisions}
    for division in (d for d in divisions if d.is_open and d.pairs.baseline_s):
        ratios = division.pairs.ratios
        to_beat = max((low for one, low in worst_of.items() if one != id(division)), default=0.0)
        if best is not None and best.ratio_low is not None and division.pairs.compare().high < best.ratio_low:
            _leave(division, f"slower than {best.num_ranks} ranks, {best.mode}: not pursued")
        elif len(ratios) == HOPELESS_ROUNDS and is_hopeless(max(ratios), to_beat):
            _leave(division, f"{HOPELESS_ROUNDS} rounds, in each less than half as fast as one process: not pursued")


def _leave(division: Division, reason: str) -> None:
    division.is_open = False
    division.trial = timed(division)
    if division.trial.outcome == "inconclusive":
        division.trial = replace(division.trial, reason=reason)


def _shares(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each kind of exchange the median over the runs, the costliest first."""
    found = {kind: stats.summarize([run.get(kind, 0.0) for run in runs]).median for run in runs for kind in run}
    return dict(sorted(found.items(), key=lambda one: -one[1]))
