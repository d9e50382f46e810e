"""Which levers of communication are worth trying on a division, and what has one of them brought?

In: a division with its timed runs. Out: levers, or why not; its trial with what it gains beside the division without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flatout.judge import rank_tuning, stats
from flatout.judge.rank_tuning import RankTrial
from flatout.records.trace import Levers
from flatout.trials.rank_divisions import Division
from flatout.trials.samples_of_runs import Setting
from flatout.trials.search.space import Choice, left_out

LEAST_SHARE = 0.02
"""Where sums of gradients take less of the time than this, nothing can be gained that could be told."""

MOST_SETTINGS = 2
"""So many settings of a lever are tried: each takes as many runs as a division."""


def best(divisions: Sequence[Division]) -> Division | None:
    """What levers are tried on: the division that wins, else the one that comes closest; None where none was timed."""
    won = rank_tuning.best_of([division.trial for division in divisions])
    timed = [d for d in divisions if d.trial.ratio is not None and d.trial.agreement == "agrees"]
    timed = [d for d in timed if d.trial is won or (won is None and d.trial.outcome != "failed")]
    return max(timed, key=lambda d: d.trial.ratio or 0.0, default=None)


def why_not(division: Division) -> str:
    """Why no lever of communication can bring a division anything that counts; empty where one may."""
    share = division.sums_share
    if share is None:
        return "what sums of gradients take there is not known"
    if share < LEAST_SHARE:
        return f"sums of gradients take {100 * share:.1f} % of the time there that nothing hides: nothing to gain"
    if (division.trial.ratio_high or 0.0) / max(1 - share, 1e-3) < 1:
        return "it would be slower than one process even if sums of gradients took no time"
    return ""


def levers_for(division: Division, setting: Setting, accept: str) -> Iterator[tuple[str, tuple[Levers, ...], str]]:
    """Each lever, what is to be tried of it beside those that the division has, and why not where nothing is."""
    facts = next((one.facts for one in division.samples if one.facts is not None), None)
    for name, lever in setting.registry.items():
        if not lever.modes:
            continue
        if facts is None:
            yield name, (), "what it trains is not known"
            continue
        reason = left_out(lever, Choice(accept=accept)) or lever.applies(facts, setting.machine)
        tried = () if reason else lever.settings(facts, setting.machine)[:MOST_SETTINGS]
        yield name, tuple({name: settings} for settings in tried), reason or ""


def with_gain(division: Division) -> RankTrial:
    """The trial of a division with one lever more: it wins where it surely is faster than without it."""
    base, trial = division.base, division.trial
    if base is None or trial.outcome in ("failed", "refused"):
        return trial
    found = division.gains.compare()
    gain, low, high = division.gains.ratio()
    if gain is None:
        return replace(trial, outcome="inconclusive", reason=f"not timed beside {base.label}")
    trial = replace(trial, gain=gain, gain_low=low, gain_high=high)
    told = f"{gain:.2f}x [{low:.2f}, {high:.2f}] beside {base.label}"
    if found.verdict == "faster":
        return replace(trial, reason=told)
    return replace(trial, outcome=found.verdict, reason=f"{told}: not kept")


def took_s(num: int, run_s: float) -> float:
    """What trying so many sets of levers takes at least: each is compared, and timed beside its base and one process.

    >>> took_s(1, 6.0)
    78.0
    """
    return (num + stats.MIN_PAIRS * (num + 2)) * run_s
