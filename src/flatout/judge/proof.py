"""What do whole runs with and without a plan prove? Their metric, their time, their energy, seed by seed.

In: the `WholeRun`s of several seeds. Out: a `Proof`. How they were run is in `flatout.trials.proving`, their files in
`flatout.judge.proof_file`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flatout.judge import equivalence, stats
from flatout.judge.equivalence import Equivalence
from flatout.judge.metric import Metric, Reading, reached_s, rises
from flatout.judge.stats import Comparison
from flatout.records.ceilings import Machine
from flatout.records.trace import Levers

FORMAT = 1  # 1: first version

NOT_AT_WORK = "nothing of the plan was at work"

INTERRUPTED = "you stopped it"
"""Why a proof ended that Ctrl-C ended."""

Side = Literal["plain", "plan"]
SIDES: tuple[Side, ...] = ("plain", "plan")

TELLING_DIGITS = 6
"""A reading with so many digits is not that of another training as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """One run of the script from its start to its end.

    Attributes:
        seed: Number of the seed; 0 is the script's own.
        side: With the plan or without.
        exit_code: As `subprocess` reports it.
        wall_s: From its start to its end.
        training_s: From the end of the first step to the end of the last.
        num_steps: Training steps.
        value: The metric in the end; None where it was not found.
        num_readings: How often the metric was found.
        readings: The metric on its way, thinned.
        losses_hash: Of all recorded losses; equal for runs that computed the same. Empty where there were none.
        problem: Why the run counts for nothing, or empty.
        remarks: What went wrong on our side, or was said in the end.
        engaged: Whether all of the plan's levers were at work, and none broke.
        idle: Levers that were not at work, and why.
        doubled: The first line in which the metric was found more than once, or empty.
        inputs: What it read of the user's files, each with a mark of its content.
        environment: Variables that it saw, each with a mark of its value.
        foreign_fraction: What others used of the CPU meanwhile.
        joules: Energy used meanwhile; None where not readable.
        why_no_energy: Why not, or empty.
    """

    seed: int
    side: Side
    exit_code: int
    wall_s: float
    training_s: float
    num_steps: int
    value: float | None = None
    num_readings: int = 0
    readings: tuple[Reading, ...] = ()
    losses_hash: str = ""
    problem: str = ""
    remarks: tuple[str, ...] = ()
    engaged: bool = True
    idle: Mapping[str, str] = field(default_factory=dict)
    doubled: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    foreign_fraction: float | None = None
    joules: float | None = None
    why_no_energy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be proved; runs of equal `Asked` belong together.

    Attributes:
        script: As it was typed, with its arguments.
        source_hash: Of the script's file and what it imports from beside it.
        levers: The plan's.
        metric: Where the metric is found.
        seed_option: The script's option for a seed, or empty.
        versions: flatout, framework, Python.
        machine_key: See `Machine.machine_key`.
    """

    script: str
    source_hash: str
    levers: Levers
    metric: Metric
    seed_option: str
    versions: tuple[str, ...]
    machine_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was proved.

    Attributes:
        asked: What was to be proved.
        num_seeds: How many seeds were asked for.
        equivalence: Of the metric.
        time: Wall seconds of whole runs, plain over plan.
        training_time: The same from the first step to the last.
        target: The metric's value that was to be reached, or None.
        target_time: Seconds to it, plain over plan; None without a target or where it cannot be seen.
        reached: Of how many seeds each side reached the target.
        rising: Whether the metric is to rise to the target or to fall to it.
        energy: Joules of whole runs, plain over plan; None where not readable.
        seeds_ignored: Whether plain runs of different seeds computed the same.
        runs: Everything behind it.
        machine: Where.
        created: When, ISO 8601.
        stopped: Why it ended early, or empty.
        notes: What the reader must know.
        losses_equal: Whether every recorded loss was the same on both sides of every seed.
        options: What names the plan or the levers, to be typed again.
        metric_options: What else was typed, as where the metric is; to be typed again.
        run: The folder of its runs.
    """

    asked: Asked
    num_seeds: int
    equivalence: Equivalence
    time: Comparison
    training_time: Comparison
    target: float | None
    target_time: Comparison | None
    reached: tuple[int, int]
    energy: Comparison | None
    seeds_ignored: bool
    runs: tuple[WholeRun, ...]
    machine: Machine
    created: str
    stopped: str = ""
    notes: tuple[str, ...] = ()
    losses_equal: bool = False
    options: str = ""
    metric_options: str = ""
    rising: bool = True
    run: str = ""
    format: int = FORMAT

    @property
    def against_itself(self) -> bool:
        """Whether both sides are plain (A/A)."""
        return not self.asked.levers

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.stopped == INTERRUPTED

    def by_seed(self) -> list[tuple[int, WholeRun | None, WholeRun | None]]:
        """Each seed with its run without the plan and the one with it, as far as they were made."""
        made = {(run.seed, run.side): run for run in self.runs}
        return [(seed, made.get((seed, "plain")), made.get((seed, "plan"))) for seed in sorted({s for s, _ in made})]


def side_name(side: Side, levers: Levers) -> str:
    """How people call a side; without levers both are plain.

    >>> side_name("plan", {"bf16": {}}), side_name("plan", {}), side_name("plain", {})
    ('under the plan', 'plain again', 'plain')
    """
    return "plain" if side == "plain" else "under the plan" if levers else "plain again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """How far to go, and what is asked of the metric.

    Attributes:
        num_seeds: Over how many seeds; two runs each.
        margin: What difference of the metric may be; None for the plain seeds' standard deviation.
        target: The metric's value to which time is measured too; None for none.
    """

    num_seeds: int = 5
    margin: float | None = None
    target: float | None = None


@dataclass(slots=True)
class _Pairs:
    """Runs of one seed, side by side."""

    plain: list[WholeRun] = field(default_factory=list)
    plan: list[WholeRun] = field(default_factory=list)


def prove(asked: Asked, aim: Aim, runs: Sequence[WholeRun], machine: Machine, created: str, stopped: str = "") -> Proof:
    """Judge what has been run so far."""
    pairs = _paired(runs)
    ignored = seeds_ignored(runs)
    rising = rises(asked.metric.name, [r.readings for r in (*pairs.plain, *pairs.plan)])
    return Proof(
        asked=asked,
        num_seeds=aim.num_seeds,
        equivalence=_in_spite_of_all(_equivalence(pairs, aim, ignored), runs, pairs, asked.levers),
        time=stats.compare([r.wall_s for r in pairs.plain], [r.wall_s for r in pairs.plan]),
        training_time=stats.compare([r.training_s for r in pairs.plain], [r.training_s for r in pairs.plan]),
        target=aim.target,
        target_time=_target_time(pairs, aim.target, rising=rising),
        reached=(_reached(pairs.plain, aim.target, rising=rising), _reached(pairs.plan, aim.target, rising=rising)),
        rising=rising,
        energy=_energy(pairs),
        seeds_ignored=ignored,
        runs=tuple(runs),
        machine=machine,
        created=created,
        stopped=stopped,
        notes=tuple(_notes(runs, pairs, asked.levers)),
        losses_equal=all(a.losses_hash == b.losses_hash != "" for a, b in _beside(pairs)),
    )


def _paired(runs: Sequence[WholeRun]) -> _Pairs:
    usable = {(r.seed, r.side): r for r in runs if not r.problem}
    seeds = sorted({seed for seed, _ in usable if all((seed, side) in usable for side in SIDES)})
    return _Pairs([usable[seed, "plain"] for seed in seeds], [usable[seed, "plan"] for seed in seeds])


def seeds_ignored(runs: Sequence[WholeRun]) -> bool:
    """Whether plain runs of at least two seeds computed the same, loss by loss or, without losses, in every reading.

    Readings of few digits may well be the same by chance.
    """
    plain = [r for r in runs if r.side == "plain" and not r.problem]
    if any(r.readings and not any(math.isfinite(one.value) for one in r.readings) for r in plain):
        return False  # all that diverge at once look the same
    if not all(r.losses_hash or any(_has_digits(one.value) for one in r.readings) for r in plain):
        return False
    marks = {r.losses_hash or repr([reading.value for reading in r.readings]) for r in plain}
    return len(plain) > 1 and len(marks) == 1


def _has_digits(value: float) -> bool:
    """Whether a value has so many digits that two trainings do not share it by chance."""
    return math.isfinite(value) and float(f"{value:.{TELLING_DIGITS - 1}g}") != value


def _equivalence(pairs: _Pairs, aim: Aim, ignored: bool) -> Equivalence:
    plain = [r.value for r in pairs.plain if r.value is not None]
    plan = [r.value for r in pairs.plan if r.value is not None]
    if ignored:  # as many runs as there are, they are one seed
        plain, plan = plain[:1], plan[:1]
    return equivalence.compare(plain, plan, aim.margin)


def _in_spite_of_all(found: Equivalence, runs: Sequence[WholeRun], pairs: _Pairs, levers: Levers) -> Equivalence:
    """What the values say, unless something else says that they do not say it."""
    found = _despite_failures(found, runs, side_name("plan", levers))
    idle = idle_levers(runs, levers)
    if idle and len(idle) == len(levers) and found.verdict != "different":
        why = "; ".join(f"{name}: {reason}" for name, reason in idle.items())
        return replace(found, verdict="undecided", more_seeds=None, reason=f"{NOT_AT_WORK} ({why})")
    if found.verdict in ("identical", "equivalent"):
        for plain, plan in _beside(pairs):
            if plain.num_steps == plan.num_steps and plain.num_readings != plan.num_readings:
                reason = (
                    f"with seed {plain.seed} the metric was found {plain.num_readings} times and "
                    f"{plan.num_readings} times in as many steps: the last ones are not of the same moment"
                )
                return replace(found, verdict="undecided", more_seeds=None, reason=reason)
    return found


def idle_levers(runs: Sequence[WholeRun], levers: Levers) -> dict[str, str]:
    """Levers that were not at work in any run under the plan, and why."""
    ended = [r for r in runs if r.side == "plan" and not r.problem]
    return {name: ended[-1].idle[name] for name in levers if ended and all(name in r.idle for r in ended)}


def _despite_failures(found: Equivalence, runs: Sequence[WholeRun], changed: str) -> Equivalence:
    """Seeds that the plan did not survive are no reason to call those that it did survive the same."""
    plain = {r.seed for r in runs if r.side == "plain" and not r.problem}
    ended = {r.seed for r in runs if r.side == "plan" and not r.problem}
    failed = [r for r in runs if r.side == "plan" and r.problem and r.seed in plain - ended]
    broken = [str(r.seed) for r in failed if r.exit_code != 0]
    if broken:
        reason = f"{changed} the script failed with seed {', '.join(broken)}, with which it does not fail plain"
        return replace(found, verdict="different", more_seeds=None, reason=reason)
    if failed and found.verdict in ("identical", "equivalent"):
        numbers = ", ".join(str(r.seed) for r in failed)
        reason = f"{changed} nothing came of seed {numbers}, which counts plain"
        return replace(found, verdict="undecided", more_seeds=None, reason=reason)
    return found


def _target_time(pairs: _Pairs, target: float | None, *, rising: bool) -> Comparison | None:
    if target is None:
        return None
    times = [
        (reached_s(a.readings, target, rising=rising), reached_s(b.readings, target, rising=rising))
        for a, b in _beside(pairs)
    ]
    both = [(a, b) for a, b in times if a is not None and b is not None]
    return stats.compare([a for a, _ in both], [b for _, b in both])


def _reached(runs: Sequence[WholeRun], target: float | None, *, rising: bool) -> int:
    return 0 if target is None else sum(reached_s(r.readings, target, rising=rising) is not None for r in runs)


def _energy(pairs: _Pairs) -> Comparison | None:
    both = [(a.joules, b.joules) for a, b in _beside(pairs) if a.joules is not None and b.joules is not None]
    return stats.compare([a for a, _ in both], [b for _, b in both]) if both else None


def _beside(pairs: _Pairs) -> list[tuple[WholeRun, WholeRun]]:
    return list(zip(pairs.plain, pairs.plan, strict=True))


def _notes(runs: Sequence[WholeRun], pairs: _Pairs, levers: Levers) -> list[str]:
    first, second = ("without the plan", "with it") if levers else ("plain", "plain again")
    lines = [
        f"seed {r.seed}, {r.side if levers else side_name(r.side, levers)}: {r.problem}" for r in runs if r.problem
    ]
    lines += [
        f"seed {a.seed}: the metric was found {a.num_readings} times {first}, {b.num_readings} times {second}"
        for a, b in _beside(pairs)
        if a.num_readings != b.num_readings
    ]
    lines += _notes_on_steps(pairs, first, second)
    doubled = next((r.doubled for r in runs if r.doubled), "")
    if doubled:
        lines.append(f"the metric is found more than once in the line `{doubled}`: the last one counts")
    lines += _notes_on_levers([r for r in runs if r.side == "plan" and not r.problem], levers)
    busy = max((r.foreign_fraction or 0.0 for r in (*pairs.plain, *pairs.plan)), default=0.0)
    if busy > 0.1:
        lines.append(f"other processes used up to {100 * busy:.0f} % of the CPU during a run: times are less sure")
    return lines


def _notes_on_steps(pairs: _Pairs, first: str, second: str) -> list[str]:
    """Where the runs of a seed made another number of steps; one line where it is the same with every seed."""
    numbers = [(f"seed {a.seed}", a.num_steps, b.num_steps) for a, b in _beside(pairs)]
    if len(numbers) > 1 and len({(a, b) for _, a, b in numbers}) == 1:
        numbers = [("every seed", *numbers[0][1:])]
    return [f"{which}: {a} steps {first}, {b} {second}" for which, a, b in numbers if a != b]


def _notes_on_levers(runs: Sequence[WholeRun], levers: Levers) -> list[str]:
    """Levers that were not at work with some seed, and why; and seeds with which some lever broke."""
    lines = []
    for name in levers:
        idle = [r for r in runs if name in r.idle]
        if idle:
            seeds = "" if len(idle) == len(runs) else f" with seed {', '.join(str(r.seed) for r in idle)}"
            lines.append(f"{name} was not at work{seeds}: {idle[-1].idle[name]}")
    broken = [r for r in runs if not r.engaged and r.remarks]
    if broken:
        seeds = ", ".join(str(r.seed) for r in broken)
        lines.append(f"something of ours broke under the plan with seed {seeds}: {broken[-1].remarks[0]}")
    return lines


def summary_of(proof: Proof) -> dict[str, Any]:
    """The proof for programs."""
    found = proof.equivalence
    return {
        "script": proof.asked.script,
        "levers": proof.asked.levers,
        "metric": proof.asked.metric.name,
        "verdict": found.verdict,
        "equivalence": found,
        "time": proof.time,
        "training_time": proof.training_time,
        "target": proof.target,
        "target_time": proof.target_time,
        "reached": proof.reached,
        "energy": proof.energy,
        "seeds_ignored": proof.seeds_ignored,
        "notes": proof.notes,
        "stopped": proof.stopped,
        "runs": [
            {"seed": r.seed, "side": r.side, "value": r.value, "wall_s": r.wall_s, "problem": r.problem}
            for r in proof.runs
        ],
        "run": proof.run,
    }
