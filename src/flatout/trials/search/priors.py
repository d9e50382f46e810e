"""What do earlier tunings on this machine say of a script? In which order the search should try things, and no more.

In: records of earlier tunings, and what is seen of the script that is tuned now. Out: `Advice` for the search. No
number of it is ever shown as a gain, and nothing goes untried for it: what was true of one script is a guess about
another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flatout.judge.anatomy import Anatomy
from flatout.judge.diagnosis import Diagnosis
from flatout.judge.result import Result
from flatout.records.facts import Facts
from flatout.records.plan import Candidate, Key, Trial
from flatout.records.trace import Levers

FORMAT = 1  # 1: first version

LIKE_ENOUGH = 0.5
"""Scripts that are less like this one say nothing of it."""

WORTH_MOVING = 0.01
"""A gain or loss that is expected to be smaller than this (as a logarithm) moves nothing."""

BROKEN = ("failed", "disagrees")
BROKE = math.log(0.75)
"""What a set that failed, or computed other numbers, is counted as: a clear loss."""

MOST_FORMER = 2
"""So many sets that similar scripts were tuned to are tried as they are."""

MOST_TRIED = 200
"""Sets of one tuning that are kept: the latest."""

LARGEST = math.log(1e4)
"""No step becomes so many times faster or slower: a record that says so is torn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tuning holds: records of another place are not looked at.

    Attributes:
        machine: `Machine.machine_key`: the processor, its features, its usable cores, the accelerators.
        framework: For example `pytorch 2.13`: patches of a version share a place.
        device: What the script computes on: `cpu`, `cuda` ...
    """

    machine: str
    framework: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What two scripts are compared by, all of it seen before anything is tried.

    Attributes:
        script: A digest of where the script lies; equal for the same script.
        binding: What binds, as the diagnosis says.
        kinds: What the models are made of: `convolution 2`, `recurrent`, `attention`; `dense` where none of these.
        dtypes: What their parameters are.
        shares: By phase its share of the step, 0 to 1.
        step_s: How long a plain step takes.
    """

    script: str
    binding: str
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    shares: Mapping[str, float]
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a set of levers brought.

    Attributes:
        levers: The set.
        outcome: As of a `Trial`.
        agreement: As of a `Trial`.
        log_ratio: Logarithm of the ratio; NaN where there is none.
        log_low: Of the lower end of its interval.
        log_high: Of the upper end.
    """

    levers: Levers
    outcome: str
    agreement: str = ""
    log_ratio: float = math.nan
    log_low: float = math.nan
    log_high: float = math.nan

    @property
    def believed(self) -> float:
        """The logarithm, less of it the wider its interval: half of one that may as well be twice as large as nothing.

        >>> round(Tried(levers={}, outcome="slower", log_ratio=-0.2, log_low=-0.2, log_high=-0.2).believed, 3)
        -0.2
        >>> round(Tried(levers={}, outcome="inconclusive", log_ratio=-0.2, log_low=-0.4, log_high=0.0).believed, 3)
        -0.1
        """
        if self.outcome in BROKEN:
            return BROKE
        if math.isnan(self.log_ratio) or (self.log_ratio > 0 and self.agreement != "agrees"):
            return 0.0
        wide = (self.log_high - self.log_low) / 2
        signal = self.log_ratio**2
        return self.log_ratio * signal / (signal + (0.0 if math.isnan(wide) else wide) ** 2) if signal else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is kept of one tuning.

    Attributes:
        tried: Each set that was tried.
        won: The set that became the plan; empty where none did.
    """

    format: int
    place: Place
    traits: Traits
    tried: tuple[Tried, ...]
    won: Levers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What earlier tunings suggest.

    Attributes:
        expected: By set of levers the expected logarithm of its ratio; without those that nothing is known of.
        own: What this script was tuned to last.
        former: What similar scripts were tuned to, the likeliest to win first.
        num_tunings: Tunings behind it.
    """

    expected: Mapping[Key, float] = field(default_factory=dict)
    own: tuple[Levers, ...] = ()
    former: tuple[Levers, ...] = ()
    num_tunings: int = 0


def place_of(machine: str, framework: str, version: str, device: str) -> Place:
    """The place of a tuning; only the first two numbers of the version count.

    >>> place_of("0f3a", "pytorch", "2.13.0+cpu", "cpu").framework
    'pytorch 2.13'
    """
    return Place(machine=machine, framework=f"{framework} {'.'.join(version.split('.')[:2])}", device=device)


def traits_of(script: str, facts: Facts, anatomy: Anatomy, diagnosis: Diagnosis) -> Traits:
    """What a script is compared by; `script` is its digest."""
    kinds = {f"convolution {dims}" for model in facts.models for dims in model.convolution_dims}
    kinds |= {"recurrent"} if any(model.recurrent for model in facts.models) else set()
    kinds |= {"attention"} if facts.attention else set()
    shares = {phase: anatomy.share(phase) or 0.0 for phase in anatomy.phases_s}
    return Traits(
        script=script,
        binding=diagnosis.binding,
        kinds=tuple(sorted(kinds or {"dense"})),
        dtypes=tuple(sorted({dtype for model in facts.models for dtype in model.dtypes})),
        shares={phase: round(min(max(share, 0.0), 1.0), 4) for phase, share in shares.items()},
        step_s=anatomy.step_s,
    )


def tuning_of(place: Place, traits: Traits, trials: Iterable[Trial], won: Levers) -> Tuning:
    """What is to be kept of a tuning: of a set that was measured again, what came of that."""
    latest: dict[Key, Trial] = {}
    for trial in trials:
        if trial.levers and (trial.ratio is not None or trial.outcome in BROKEN):
            latest[Candidate(levers=trial.levers).key] = trial
    tried = tuple(_tried(trial) for trial in latest.values())
    return Tuning(format=FORMAT, place=place, traits=traits, tried=tried[-MOST_TRIED:], won=won)


def tuning_of_result(result: Result, script: str) -> Tuning | None:
    """The same of a result; None where nothing could be measured."""
    again = (result.remeasured,) if result.remeasured is not None else ()
    header, facts = result.header, result.facts
    place = place_of(result.machine.machine_key(), header.framework, header.framework_version, facts.device)
    traits = traits_of(script, facts, result.anatomy, result.diagnosis)
    tuning = tuning_of(place, traits, (*result.trials, *again), result.plan.levers if result.plan else {})
    return tuning if tuning.tried else None


def _tried(trial: Trial) -> Tried:
    ratio, low, high = (_log(value) for value in (trial.ratio, trial.ratio_low, trial.ratio_high))
    return Tried(
        levers=trial.levers,
        outcome=trial.outcome,
        agreement=trial.agreement,
        log_ratio=ratio,
        log_low=low if not math.isnan(low) else ratio,
        log_high=high if not math.isnan(high) else ratio,
    )


def _log(ratio: float | None) -> float:
    if ratio is None or not 0 < ratio < math.inf:
        return math.nan
    return min(max(math.log(ratio), -LARGEST), LARGEST)


def fault(tuning: Tuning) -> str:
    """What no tuning can have brought, or empty: a file that somebody else wrote may say anything."""
    logs = [one for each in tuning.tried for one in (each.log_ratio, each.log_low, each.log_high)]
    if any(abs(one) > LARGEST for one in logs):
        return "a ratio is out of all proportion"
    if not all(0 <= share <= 1 for share in tuning.traits.shares.values()):
        return "a share of the step is none"
    if not 0 < tuning.traits.step_s < math.inf:
        return "a step takes no time, or forever"
    return "" if tuning.format == FORMAT else f"its format is {tuning.format}"


def likeness(one: Traits, other: Traits) -> float:
    """How alike two scripts are, 0 to 1, as far as is seen before anything is tried.

    The share of the step that both spend in the same phases, less where another thing binds, the models are made of
    other parts or numbers, or a step is ten times as long. The same script is at least half like itself, whatever its
    arguments make of it.
    """
    phases = {*one.shares, *other.shares}
    common = math.fsum(min(one.shares.get(p, 0.0), other.shares.get(p, 0.0)) for p in phases)
    whole = max(math.fsum(one.shares.values()), math.fsum(other.shares.values()))
    kinds = len({*one.kinds} & {*other.kinds}) / max(len({*one.kinds} | {*other.kinds}), 1)
    found = min(common / whole, 1.0) if whole > 0 else 0.0
    found *= 1.0 if one.binding == other.binding else 0.7
    found *= 0.5 + 0.5 * kinds
    found *= 1.0 if {*one.dtypes} == {*other.dtypes} else 0.5
    found /= 1 + abs(math.log10(one.step_s) - math.log10(other.step_s))
    return (1 + found) / 2 if one.script == other.script else found


def advice(tunings: Sequence[Tuning], place: Place, traits: Traits) -> Advice:
    """What earlier tunings suggest for a script with these traits, at this place.

    Args:
        tunings: Those that are kept, the latest last.
        place: Where it is tuned now.
        traits: What is seen of it.
    """
    here = [(likeness(one.traits, traits), one) for one in tunings if one.place == place]
    alike = [(like, one) for like, one in here if like >= LIKE_ENOUGH]
    own = next((one for _, one in reversed(alike) if one.traits.script == traits.script), None)
    others = [(like, one) for like, one in alike if one.traits.script != traits.script]
    return Advice(
        expected=_expected(alike),
        own=(own.won,) if own is not None and own.won else (),
        former=_former(others),
        num_tunings=len(alike),
    )


def _expected(alike: Sequence[tuple[float, Tuning]]) -> dict[Key, float]:
    """By set the mean of what it brought, weighted by likeness, beside one script more to which it brought nothing."""
    gains: dict[Key, list[tuple[float, float]]] = {}
    for like, tuning in alike:
        for tried in tuning.tried:
            gains.setdefault(Candidate(levers=tried.levers).key, []).append((like, tried.believed))
    means = {
        key: math.fsum(like * gain for like, gain in found) / (1 + math.fsum(like for like, _ in found))
        for key, found in gains.items()
    }
    return {key: mean for key, mean in means.items() if abs(mean) >= WORTH_MOVING}


def _former(others: Sequence[tuple[float, Tuning]]) -> tuple[Levers, ...]:
    """Whole sets that won, those first for which most is to be said."""
    votes: dict[Key, float] = {}
    sets: dict[Key, Levers] = {}
    for like, tuning in others:
        if tuning.won:
            key = Candidate(levers=tuning.won).key
            gain = next((t.believed for t in tuning.tried if Candidate(levers=t.levers).key == key), 0.0)
            votes[key] = votes.get(key, 0.0) + like * max(gain, 0.0)
            sets[key] = tuning.won
    return tuple(sets[key] for key in sorted(votes, key=lambda key: -votes[key])[:MOST_FORMER])
