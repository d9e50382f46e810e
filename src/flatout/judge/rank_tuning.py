"""On how many ranks, and divided how, is a script fastest? The candidates, what measuring each gave, and the choice.

In: a number of ranks, and the step times of whole short runs, paired with those of one process. Out: a `RankTuning` and
its file. What is measured is in `flatout.trials.rank_conduct`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.records import files
from flatout.records.as_json import to_json
from flatout.records.ceilings import Machine
from flatout.records.plan import Plan, label
from flatout.records.ranks import GROUPED_MODES, MODES, sharing_ranks
from flatout.records.trace import Levers

FORMAT = 1  # 1: first version
FILE = "rank-tuning.json"

WORTH_MORE_RANKS = 1.01
"""More ranks are taken where they are at least this much faster than fewer."""

RankOutcome = Literal["faster", "slower", "no difference", "inconclusive", "disagrees", "failed", "refused"]
RankVerdict = Literal["faster", "one rank is faster", "no difference", "inconclusive", "not divided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrial:
    """One way to divide a script over ranks, measured beside one process.

    Attributes:
        num_ranks: The world.
        mode: How the work is divided, one of `flatout.records.ranks.MODES` but `auto`.
        levers: Levers of communication that were engaged beside those of the plan.
        outcome: The verdict in one word: beside one process, and where it has levers beside the same without the last.
        gain: Step time without its last lever over that with it; None where it has no levers.
        gain_low: Lower end of the 95 % interval of that.
        gain_high: Upper end of the 95 % interval of that.
        reason: Why, where the outcome needs it; of a refusal its error.
        cause: Of a refusal: why.
        hint: Of a refusal: what helps.
        ratio: Step time of one process over that of the ranks: above 1 is faster; None where not measured.
        ratio_low: Lower end of the 95 % interval.
        ratio_high: Upper end of the 95 % interval.
        num_pairs: Pairs of runs behind the ratio.
        step_s: Median over the runs of their median step; None where not measured.
        spread_fraction: Half the interquartile range of the runs over their median; NaN of one run.
        peak_memory_bytes: Highest memory of a rank, in the run with the most.
        step_memory_bytes: The same within a single step, median over the steps that were compared: without the calls
            that are computed both ways, and without the start. None where nothing tells.
        exchanges_share: Share of training that every rank spent in exchanges while it computed nothing, median.
        exchange_shares: The same for each kind of exchange, the costliest first.
        agreement: `agrees`, `disagrees`, `inconclusive`, or empty where it was not judged.
        agreement_detail: The numbers behind it.
        class_: What the ranks change: `rounding`, `precision` under such levers, or `statistical` where they draw other
            random numbers.
        baseline_step_s: Median step of each run of one process, the raw samples.
        candidate_step_s: The same of the run on ranks beside it.
        took_s: What measuring it cost.
    """

    num_ranks: int
    mode: str
    outcome: RankOutcome
    reason: str = ""
    cause: str = ""
    hint: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    num_pairs: int = 0
    step_s: float | None = None
    spread_fraction: float | None = None
    peak_memory_bytes: int | None = None
    step_memory_bytes: int | None = None
    exchanges_share: float | None = None
    exchange_shares: Mapping[str, float] = field(default_factory=dict)
    agreement: str = ""
    agreement_detail: str = ""
    class_: str = "rounding"
    baseline_step_s: tuple[float, ...] = ()
    candidate_step_s: tuple[float, ...] = ()
    took_s: float = 0.0
    levers: Levers = field(default_factory=dict)
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None

    @property
    def label(self) -> str:
        """What it is called."""
        beside = f", {label(self.levers)}" if self.levers else ""
        return f"{self.num_ranks} ranks, {self.mode}{beside}"

    @property
    def is_won(self) -> bool:
        """Whether it is faster, and trains what one process trains."""
        return self.outcome == "faster" and self.agreement == "agrees"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTuning:
    """What `tune --ranks` found.

    Attributes:
        format: Version of this record.
        flatout: Version that wrote it.
        created: ISO 8601, UTC, to the second.
        script: The script's name.
        typed: The script and its arguments as one would type them again.
        machine: Where it was measured.
        framework: `pytorch`.
        framework_version: Its version.
        num_ranks: The most ranks that were asked for.
        verdict: `faster` where a plan was made; `one rank is faster` where every division surely is slower; `not
            divided` where none trains what one process does.
        levers: The levers of the plan under which all runs were timed; empty for the plain script.
        step_s: Median over the runs of one process of their median step.
        spread_fraction: Half the interquartile range of these runs over their median; NaN of one run.
        peak_memory_bytes: Highest memory of one process.
        step_memory_bytes: The same within a single step, median over the steps that were compared.
        num_steps: Steps of each run that was timed.
        num_compared_steps: Steps after which what was trained was compared.
        num_runs: Runs that were started.
        trials: What was tried.
        tuning_s: Wall seconds that all of it took.
        plan: The plan with ranks; None where one process is to stay.
        plan_path: Where it was written, or where ranks were taken out of a plan; None where nothing was.
        stopped: Why it ended before it was done, or empty.
        remarks: What the reader must know.
        run: The run folder.
    """

    format: int
    flatout: str
    created: str
    script: str
    typed: str
    machine: Machine
    framework: str
    framework_version: str
    num_ranks: int
    verdict: RankVerdict
    levers: Levers
    step_s: float
    spread_fraction: float
    num_steps: int
    num_compared_steps: int
    num_runs: int
    trials: tuple[RankTrial, ...]
    tuning_s: float
    peak_memory_bytes: int | None = None
    step_memory_bytes: int | None = None
    plan: Plan | None = None
    plan_path: str | None = None
    stopped: str = ""
    remarks: tuple[str, ...] = ()
    run: str = ""

    @property
    def winner(self) -> RankTrial | None:
        """What the plan is made of; None where one process is to stay."""
        return best_of(self.trials)

    @property
    def fastest(self) -> RankTrial | None:
        """The division with the highest ratio, whatever the verdict on it; None where none was timed."""
        return max(
            (t for t in self.trials if t.ratio is not None and not t.levers), key=lambda t: t.ratio or 0.0, default=None
        )

    @property
    def leanest(self) -> RankTrial | None:
        """Of the divisions that agree the one whose ranks hold least within a step; None where nothing tells."""
        known = [t for t in self.trials if t.step_memory_bytes is not None and t.agreement == "agrees"]
        return min(known, key=lambda t: t.step_memory_bytes or 0, default=None)

    def memory_fraction(self, trial: RankTrial) -> float | None:
        """What a rank of a division holds within a step, as a fraction of what one process does."""
        held, alone = trial.step_memory_bytes, self.step_memory_bytes
        return held / alone if held is not None and alone else None


def candidates(num_ranks: int) -> list[tuple[int, str]]:
    """What is worth trying on up to so many ranks: all of them and halves, in each mode that differs from the others.

    >>> candidates(2)
    [(2, 'replicate'), (2, 'shard'), (2, 'tensor'), (2, 'tensor+sequence'), (2, 'pipeline')]
    >>> [c for c in candidates(6) if c[1] == "replicate"]
    [(6, 'replicate'), (3, 'replicate')]
    """
    numbers = [num_ranks]
    while numbers[-1] % 2 == 0 and numbers[-1] > 2:
        numbers.append(numbers[-1] // 2)
    return [(num, mode) for num in numbers for mode in MODES if mode != "auto" and _fits(num, mode)]


def _fits(num_ranks: int, mode: str) -> bool:
    """Whether a mode is something of its own: on one machine groups need a number that has a divisor."""
    return mode not in GROUPED_MODES or sharing_ranks(num_ranks, num_ranks) > 1


def best_of(trials: Sequence[RankTrial]) -> RankTrial | None:
    """The fastest division that agrees; more ranks have to earn their number.

    Levers of communication were tried on one division. They are taken where they won beside what they are built on,
    those that gain most first: their ratios are of other runs than that of the division without them.
    """
    best: RankTrial | None = None
    plain = (t for t in trials if t.is_won and not t.levers)
    for trial in sorted(plain, key=lambda t: (t.num_ranks, -_worth(t))):
        more = WORTH_MORE_RANKS if best is not None and trial.num_ranks > best.num_ranks else 1.0
        if best is None or _worth(trial) > _worth(best) * more:
            best = trial
    for trial in sorted((t for t in trials if t.is_won and t.levers), key=lambda t: -(t.gain or 0.0)):
        if best is None or _builds_on(trial, best):
            best = trial
    return best


def _builds_on(trial: RankTrial, other: RankTrial) -> bool:
    """Whether a division is another one with more levers."""
    same = (trial.num_ranks, trial.mode) == (other.num_ranks, other.mode)
    return same and all(trial.levers.get(name) == settings for name, settings in other.levers.items())


def _worth(trial: RankTrial) -> float:
    """The ratio, moved half the way to the lower end of its interval: of several the luckiest looks best."""
    return math.sqrt(max((trial.ratio or 0.0) * (trial.ratio_low or 0.0), 0.0))


HOPELESS_ROUNDS = 2
"""After so many rounds a hopeless division is left."""

HOPELESS = 0.5
"""Less than this of one process in each of the first rounds, and less than this of another division, is hopeless."""


def is_hopeless(highest: float, to_beat: float) -> bool:
    """Whether a division is left after the first rounds.

    Args:
        highest: The best that it came to, as a multiple of one process.
        to_beat: The worst that another division came to.
    """
    return highest < HOPELESS * min(1.0, to_beat)


def was_left(trial: RankTrial) -> bool:
    """Whether it was left after the first rounds: it says nothing that the others do not say."""
    return trial.outcome == "inconclusive" and trial.num_pairs == HOPELESS_ROUNDS and (trial.ratio_high or 1) < HOPELESS


def verdict(trials: Sequence[RankTrial]) -> RankVerdict:
    """What all trials come to."""
    timed = [t for t in trials if t.ratio is not None and not t.levers and not was_left(t)]
    if best_of(trials) is not None:
        return "faster"
    if not timed:
        unclear = any(t.agreement == "inconclusive" or t.outcome == "inconclusive" for t in trials)
        return "inconclusive" if unclear else "not divided"
    if all(t.outcome == "slower" for t in timed):
        return "one rank is faster"
    known = all(t.outcome in ("slower", "no difference") for t in timed)
    return "no difference" if known else "inconclusive"


def summary_of(found: RankTuning) -> dict[str, Any]:
    """What `tune --ranks --json` prints. A number that is not known is None."""
    won = found.winner
    summary = {
        "verdict": found.verdict,
        "ranks": won.num_ranks if won else 1,
        "mode": won.mode if won else None,
        "ratio": won.ratio if won else 1.0,
        "ratio_low": won.ratio_low if won else 1.0,
        "ratio_high": won.ratio_high if won else 1.0,
        "levers": list(found.levers),
        "communication": won.levers if won else {},
        "step_s": found.step_s,
        "spread_fraction": found.spread_fraction,
        "peak_memory_bytes": found.peak_memory_bytes,
        "step_memory_bytes": found.step_memory_bytes,
        "steps": found.num_steps,
        "compared_steps": found.num_compared_steps,
        "trials": [_row(trial) for trial in found.trials],
        "tuning_s": found.tuning_s,
        "plan": found.plan_path,
        "run": found.run,
    }
    value: dict[str, Any] = to_json(summary)
    return value


def _row(trial: RankTrial) -> dict[str, Any]:
    names = (
        "mode", "levers", "outcome", "reason", "cause", "hint", "ratio", "ratio_low", "ratio_high", "num_pairs",
        "step_s", "spread_fraction", "peak_memory_bytes", "step_memory_bytes", "exchanges_share", "exchange_shares",
        "agreement", "agreement_detail", "baseline_step_s", "candidate_step_s", "gain", "gain_low", "gain_high",
    )  # fmt: skip
    return {"ranks": trial.num_ranks, **{name: getattr(trial, name) for name in names}}


def save(found: RankTuning, folder: Path) -> None:
    """Write it into its run folder.

    Raises:
        MachineError: The folder cannot be written.
    """
    files.write(found, folder / FILE)


def load(folder: Path) -> RankTuning:
    """What a run folder holds.

    Raises:
        RecordError: There is none, or it cannot be read.
    """
    return files.read(
        RankTuning, folder / FILE, missing=f"no tuning of ranks in `{folder}`",
        hint="`flatout tune --ranks N SCRIPT` makes one",
    )  # fmt: skip
