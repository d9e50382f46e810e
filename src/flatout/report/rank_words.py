"""What is said of a tuning for ranks, on the terminal and on the page alike? Verdict, memory, exchanges, what is next.

In: a `RankTuning`. Out: sentences and their parts; nothing is computed here.
"""

from __future__ import annotations

from flatout.judge.rank_tuning import RankTrial, RankTuning
from flatout.judge.stats import MIN_PAIRS
from flatout.records.plan import PLAN_FILE, label
from flatout.report import words
from flatout.report.screen import Part

WORTH_SAYING = 0.01
"""Share of training from which on a kind of exchange is named."""


def verdict(found: RankTuning) -> tuple[Part, ...]:
    """The verdict, and what it rests on."""
    won = found.winner
    if won is not None:
        speeds = f": {words.seconds(found.step_s)} → {words.seconds(won.step_s)} a step  {ends(won)}"
        return (f"{words.times(won.ratio)} faster", "bold green"), f" on {won.label}{speeds}"
    best = found.fastest
    if best is None:
        return ("one process", "bold"), f": {why_none(found)}"
    beside = (
        f": {words.seconds(found.step_s)} a step, and {words.seconds(best.step_s)} on {best.label}, the "
        f"best of them: {words.ratio(best.ratio)}x {ends(best)}"
    ).rstrip()
    if found.verdict == "one rank is faster":
        return ("one rank is faster", "bold"), beside
    if found.verdict == "no difference":
        return ("no difference", "bold"), f"{beside}. One process is simpler"
    return ("inconclusive", "bold yellow"), f"{beside}; {best.reason or 'not all could be told apart'}"


def why_none(found: RankTuning) -> str:
    """Why no division has a step time."""
    if found.verdict == "inconclusive":
        return "no division could be compared with it"
    return "no division trains what it trains, as said above"


def ends(trial: RankTrial) -> str:
    """Both ends of a division's interval; nothing of too few pairs."""
    return words.interval(trial.ratio_low, trial.ratio_high) if trial.num_pairs >= MIN_PAIRS else ""


def baseline(found: RankTuning) -> str:
    """How sure the step time of one process is, and what it takes."""
    spread = f" ± {words.percent(found.spread_fraction)}" if words.known(found.spread_fraction) else ""
    memory = f"; memory {words.memory(found.peak_memory_bytes)}" if found.peak_memory_bytes is not None else ""
    return f"{spread}  (runs of {words.plural(found.num_steps, 'step')}{memory})"


def under(found: RankTuning) -> str:
    """The levers under which all runs were timed."""
    return f"{label(found.levers)}, the levers of the plan; on ranks without those of one process's cores"


def costliest(trial: RankTrial, most: int | None = None) -> str:
    """The kinds of exchange that took most, each with its share of training.

    >>> costliest(RankTrial(num_ranks=2, mode="shard", outcome="slower", exchange_shares={"sums": 0.2, "x": 0.001}))
    'sums 20 %'
    """
    kinds = [(kind, share) for kind, share in trial.exchange_shares.items() if share >= WORTH_SAYING]
    return ", ".join(f"{kind} {words.share(share)}" for kind, share in kinds[:most])


def within_step(found: RankTuning, trial: RankTrial) -> str:
    """What a rank holds within a step, beside one process."""
    if trial.step_memory_bytes is None:
        return ""
    fraction = found.memory_fraction(trial)
    beside = f", {words.percent(fraction)} of one process's" if fraction is not None else ""
    return f"{words.memory(trial.step_memory_bytes)} within a step{beside}"


def tune_command(found: RankTuning) -> str:
    """What to type to obtain the numbers again."""
    admitted = " --accept statistical" if any(t.class_ == "statistical" and t.num_pairs for t in found.trials) else ""
    return f"flatout tune --ranks {found.num_ranks}{admitted} {found.typed}"


def next_command(found: RankTuning) -> tuple[str, str]:
    """What to type next."""
    if found.winner is not None:
        named = found.plan_path is not None and found.plan_path != PLAN_FILE
        return f"flatout run --plan {found.plan_path}" if named else "flatout run", found.typed
    if found.verdict == "inconclusive":
        return f"flatout tune --ranks {found.num_ranks} --budget {max(2 * found.tuning_s, 60):.0f}s", found.typed
    return ("flatout run" if found.levers else "flatout tune"), found.typed
