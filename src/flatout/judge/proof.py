"""What do whole runs with and without a plan prove? Their metric, their time, their energy, seed by seed.

In: the `WholeRun`s of several seeds. Out: a `Proof`; and both as files of a run folder. How they were run is in
`flatout.trials.proving`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flatout.errors import RecordError, cannot_write
from flatout.judge import equivalence, stats
from flatout.judge.equivalence import Equivalence
from flatout.judge.metric import Metric, Reading, reached_s, rises
from flatout.judge.stats import Comparison
from flatout.records import files
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import Machine
from flatout.records.trace import Levers

FORMAT = 1  # 1: first version

NOT_AT_WORK = "nothing of the plan was at work"

RUNS = "runs.jsonl"
FILE = "proof.json"

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
        fault: What first went wrong on our side, or empty.
        idle: Levers that were not at work, and why.
        doubled: The first line in which the metric was found more than once, or empty.
        inputs: What it read of the user's files, each with a mark of its content.
        foreign_fraction: What others used of the CPU meanwhile.
        joules: Energy used meanwhile; None where not readable.
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
    fault: str = ""
    idle: Mapping[str, str] = field(default_factory=dict)
    doubled: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    foreign_fraction: float | None = None
    joules: float | None = None


_Pair = tuple[WholeRun, WholeRun]
"""Runs of one seed, plain and under the plan."""


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


def prove(asked: Asked, aim: Aim, runs: Sequence[WholeRun], machine: Machine, created: str, stopped: str = "") -> Proof:
    """Judge what has been run so far."""
    usable = {(r.seed, r.side): r for r in runs if not r.problem}
    seeds = sorted(seed for seed, side in usable if side == "plain" and (seed, "plan") in usable)
    pairs = [(usable[seed, "plain"], usable[seed, "plan"]) for seed in seeds]
    ignored = seeds_ignored(runs)
    valued = pairs[:1] if ignored else pairs  # as many runs as there are, they are one seed
    values = [(a.value, b.value) for a, b in valued if a.value is not None and b.value is not None]
    found = equivalence.compare([a for a, _ in values], [b for _, b in values], aim.margin)
    rising = rises(asked.metric.name, [run.readings for pair in pairs for run in pair])
    times: list[tuple[float | None, float | None]] = []
    if (target := aim.target) is not None:
        times = [(reached_s(a.readings, target, rising=rising), reached_s(b.readings, target, rising=rising))
                 for a, b in pairs]  # fmt: skip
    joules = [(a.joules, b.joules) for a, b in pairs]
    return Proof(
        asked=asked,
        num_seeds=aim.num_seeds,
        equivalence=_in_spite_of_all(found, runs, pairs, asked.levers),
        time=stats.compare([a.wall_s for a, _ in pairs], [b.wall_s for _, b in pairs]),
        training_time=stats.compare([a.training_s for a, _ in pairs], [b.training_s for _, b in pairs]),
        target=target,
        target_time=None if target is None else _compared(times),
        reached=(sum(a is not None for a, _ in times), sum(b is not None for _, b in times)),
        rising=rising,
        energy=_compared(joules) if any(None not in both for both in joules) else None,
        seeds_ignored=ignored,
        runs=tuple(runs),
        machine=machine,
        created=created,
        stopped=stopped,
        notes=tuple(_notes(runs, pairs, asked.levers)),
        losses_equal=all(a.losses_hash == b.losses_hash != "" for a, b in pairs),
    )


def _compared(pairs: Sequence[tuple[float | None, float | None]]) -> Comparison:
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return stats.compare([a for a, _ in both], [b for _, b in both])


def seeds_ignored(runs: Sequence[WholeRun]) -> bool:
    """Whether plain runs of at least two seeds computed the same, loss by loss or, without losses, in every reading.

    Readings of few digits may well be the same by chance, and all that diverge at once look the same.
    """
    plain = [r for r in runs if r.side == "plain" and not r.problem]
    marks = set()
    for run in plain:
        values = [one.value for one in run.readings]
        finite = [x for x in values if math.isfinite(x)]
        tells = run.losses_hash or any(float(f"{x:.{TELLING_DIGITS - 1}g}") != x for x in finite)
        if not tells or (values and not finite):
            return False
        marks.add(run.losses_hash or repr(values))
    return len(plain) > 1 and len(marks) == 1


def _in_spite_of_all(
    found: Equivalence, runs: Sequence[WholeRun], pairs: Sequence[_Pair], levers: Levers
) -> Equivalence:
    """What the values say, unless something else says that they do not say it.

    Seeds that the plan did not survive are no reason to call those that it did survive the same.
    """

    def instead(verdict: equivalence.Word, reason: str) -> Equivalence:
        return replace(found, verdict=verdict, more_seeds=None, reason=reason)

    changed = side_name("plan", levers)
    ended = {side: {r.seed for r in runs if r.side == side and not r.problem} for side in SIDES}
    failed = [r for r in runs if r.side == "plan" and r.problem and r.seed in ended["plain"] - ended["plan"]]
    if broken := ", ".join(str(r.seed) for r in failed if r.exit_code != 0):
        return instead(
            "different", f"{changed} the script failed with seed {broken}, with which it does not fail plain"
        )
    idle = idle_levers(runs, levers)
    if idle and len(idle) == len(levers) and found.verdict != "different":
        why = "; ".join(f"{name}: {reason}" for name, reason in idle.items())
        return instead("undecided", f"{NOT_AT_WORK} ({why})")
    if found.verdict not in ("identical", "equivalent"):
        return found
    if failed:
        numbers = ", ".join(str(r.seed) for r in failed)
        return instead("undecided", f"{changed} nothing came of seed {numbers}, which counts plain")
    for plain, plan in pairs:
        if plain.num_steps == plan.num_steps and plain.num_readings != plan.num_readings:
            return instead(
                "undecided",
                f"with seed {plain.seed} the metric was found {plain.num_readings} times and {plan.num_readings} times "
                "in as many steps: the last ones are not of the same moment",
            )
    return found


def idle_levers(runs: Sequence[WholeRun], levers: Levers) -> dict[str, str]:
    """Levers that were not at work in any run under the plan, and why."""
    ended = [r for r in runs if r.side == "plan" and not r.problem]
    return {name: ended[-1].idle[name] for name in levers if ended and all(name in r.idle for r in ended)}


def _notes(runs: Sequence[WholeRun], pairs: Sequence[_Pair], levers: Levers) -> Iterator[str]:
    first, second = ("without the plan", "with it") if levers else ("plain", "plain again")
    for run in runs:
        if run.problem:
            yield f"seed {run.seed}, {run.side if levers else side_name(run.side, levers)}: {run.problem}"
    for a, b in pairs:
        if a.num_readings != b.num_readings:
            yield f"seed {a.seed}: the metric was found {a.num_readings} times {first}, {b.num_readings} times {second}"
    steps = [(f"seed {a.seed}", a.num_steps, b.num_steps) for a, b in pairs]
    if len(steps) > 1 and len({(a, b) for _, a, b in steps}) == 1:
        steps = [("every seed", *steps[0][1:])]
    yield from (f"{which}: {a} steps {first}, {b} {second}" for which, a, b in steps if a != b)
    if doubled := next((r.doubled for r in runs if r.doubled), ""):
        yield f"the metric is found more than once in the line `{doubled}`: the last one counts"
    ended = [r for r in runs if r.side == "plan" and not r.problem]
    for name in levers:
        if idle := [r for r in ended if name in r.idle]:
            seeds = "" if len(idle) == len(ended) else f" with seed {', '.join(str(r.seed) for r in idle)}"
            yield f"{name} was not at work{seeds}: {idle[-1].idle[name]}"
    if broken := [r for r in ended if r.fault]:
        seeds = ", ".join(str(r.seed) for r in broken)
        yield f"something of ours broke under the plan with seed {seeds}: {broken[-1].fault}"
    busy = max((run.foreign_fraction or 0.0 for pair in pairs for run in pair), default=0.0)
    if busy > 0.1:
        yield f"other processes used up to {100 * busy:.0f} % of the CPU during a run: times are less sure"


def summary_of(proof: Proof) -> dict[str, Any]:
    """The proof for programs."""
    names = ("time", "training_time", "target", "target_time", "reached", "energy", "seeds_ignored", "notes", "stopped")
    of_run = ("seed", "side", "value", "wall_s", "problem")
    return {
        "script": proof.asked.script,
        "levers": proof.asked.levers,
        "metric": proof.asked.metric.name,
        "verdict": proof.equivalence.verdict,
        "equivalence": proof.equivalence,
        **{name: getattr(proof, name) for name in names},
        "runs": [{name: getattr(run, name) for name in of_run} for run in proof.runs],
        "run": proof.run,
    }


# -- how it is kept: each finished run as a line at once, the proof in the end -----------------------------------------


def save(proof: Proof, folder: Path) -> None:
    """Write a proof beside its runs.

    Raises:
        MachineError: The disk is full, or the folder gone.
    """
    files.write(proof, folder / FILE)


def load(folder: Path) -> Proof:
    """The proof of a run folder.

    Raises:
        RecordError: There is none, or it cannot be read.
    """
    hint = "`flatout prove SCRIPT`"
    found = files.read(Proof, folder / FILE, missing=f"no proof in `{folder}`", hint=hint, newest=FORMAT)
    return replace(found, runs=tuple(_with_nan(run) for run in found.runs))


def append(run: WholeRun, folder: Path) -> None:
    """Add a finished run to those of a folder.

    Raises:
        MachineError: The disk is full, or the folder gone.
    """
    try:
        with open(folder / RUNS, "a", encoding="utf-8") as file:
            # begins with an end: behind a line that was cut off it would be lost with that
            file.write("\n" + json.dumps(to_json(run), allow_nan=False) + "\n")
    except OSError as problem:
        raise cannot_write(folder / RUNS, problem) from None


def finished_runs(folder: Path) -> list[WholeRun]:
    """The runs of a folder, in order; a line that an interruption cut off is left out."""
    try:
        lines = (folder / RUNS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(_with_nan(from_json(WholeRun, json.loads(line), where=RUNS)))
        except (ValueError, RecordError):
            continue
    return found


def _with_nan(run: WholeRun) -> WholeRun:
    """The run as it was written: JSON holds a metric of NaN as one that is not known."""
    came_to_nan = run.value is None and not run.problem and run.num_readings > 0
    return replace(run, value=float("nan")) if came_to_nan else run
