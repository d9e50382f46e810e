"""What did `tune` or `why` find? Everything that a report needs, in one record (`result.json` of a run folder).

In: the records of the chain. Out: a `Result`, its file, and the objects that `--json` prints.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flatout.judge.anatomy import Anatomy
from flatout.judge.diagnosis import Diagnosis
from flatout.judge.latency import Latency, latency
from flatout.judge.profiled_time import ProfiledTime
from flatout.judge.read_sites import ReadSites
from flatout.judge.stats import Comparison
from flatout.records import files
from flatout.records.as_json import to_json
from flatout.records.ceilings import Ceilings, Machine
from flatout.records.energy import EnergySummary
from flatout.records.facts import Facts
from flatout.records.plan import DEFAULT_CLASS, PLAN_FILE, Plan, Trial, allows, label
from flatout.records.trace import Census, Header

FORMAT = 1  # 1: first version
FILE = "result.json"

Verdict = Literal["faster", "no difference", "inconclusive"]

NOT_NAMED = "not among `--levers`"
"""Why a lever was not tried that the user did not ask for."""

BRINGS = "measured to bring"
"""In the reason of one that goes by name only, where what it takes away was measured: it is shown first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untried:
    """A lever that was not tried, and why."""

    lever: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """One measured step, for the timeline.

    Attributes:
        start_s: On the trace's clock.
        step_s: Its duration.
        group: What it belonged to: `baseline`, `anatomy`, `counterfactual`, `trial`, `winner`.
        outside_s: Evaluation and checkpoints inside it.
        label: The levers, as people read them.
        call_s: In models, where nothing is trained; None where that was not timed.
    """

    start_s: float
    step_s: float
    group: str
    outside_s: float = 0.0
    label: str = "plain"
    call_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a result of ranks that a launcher starts has beyond that of one process.

    Attributes:
        num_ranks: How many there are.
        alone: The winner as it was measured on one rank by itself; None where nothing won there.
    """

    num_ranks: int
    alone: Trial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one `tune` or `why` found.

    Attributes:
        command: `tune` or `why`.
        typed: The script and its arguments as one would type them again.
        options: The same of our own options that narrow what is tried.
        anatomy: The plain step, taken apart.
        tuned_anatomy: The step under the best candidate, taken apart; None where none was measured again.
        noise: The A/A comparison: plain against plain.
        goal: What was compared, see `Window`; of `latency` times of steps, and steps a second, are those of the
            models' calls alone.
        baseline_steps_per_s: Training steps a second, plain: of the windows beside the winner's where there is one,
            else of those at the start.
        baseline_spread_fraction: Half the interquartile range of these windows over their median;
            NaN of one window.
        baseline_window_step_s: Step time of each of these windows, the raw samples.
        remeasured: The best candidate, measured again; None where none was worth that.
        input_trial: The fastest trial of nothing but exact levers for the input, to be held against what free data
            would bring; None where none was measured.
        verdict: See `flatout.judge.stats.compare`.
        tuned_steps_per_s: Of the winner; the baseline's without one.
        tuning_s: Wall seconds that all of this took.
        break_even_steps: Steps after which the tuning is earned back; None where it never is.
        steps_in_run: Training steps of one whole run of the script, where known.
        foreign_fraction: CPU that others used, mean over the windows; None where not observed.
        refused: Writes outside the folders of the script, which were refused.
        written: Files that trials would have written, and that were discarded.
        isolation: How trials were kept off the user's disk, in a few words.
        warnings: What the reader must know.
        plan_path: Where the plan was written; None without a plan.
        energy: What the counters of this machine said; None in results of former versions.
    """

    format: int
    command: Literal["tune", "why"]
    flatout: str
    created: str
    script: str
    typed: str
    header: Header
    machine: Machine
    facts: Facts
    anatomy: Anatomy
    diagnosis: Diagnosis
    noise: Comparison | None
    baseline_steps_per_s: float
    baseline_spread_fraction: float
    baseline_window_step_s: tuple[float, ...]
    verdict: Verdict
    tuned_steps_per_s: float
    tuning_s: float
    goal: str = "throughput"
    ceilings: Ceilings | None = None
    census: Census | None = None
    tuned_anatomy: Anatomy | None = None
    trials: tuple[Trial, ...] = ()
    untried: tuple[Untried, ...] = ()
    remeasured: Trial | None = None
    input_trial: Trial | None = None
    plan: Plan | None = None
    plan_path: str | None = None
    break_even_steps: int | None = None
    steps_in_run: int | None = None
    foreign_fraction: float | None = None
    refused: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    isolation: str = ""
    warnings: tuple[str, ...] = ()
    timeline: tuple[TimelineStep, ...] = field(default=())
    run: str = ""
    options: str = ""
    stopped: str = ""
    """Why the search ended before it was done, or empty."""
    short_budget_s: float | None = None
    """The budget, where that is why; None else."""
    asked_budget_s: float | None = None
    """The budget that was asked for; None for the default."""
    energy: EnergySummary | None = None
    reads: ReadSites | None = None
    """Where values are read on the host; None where no step was looked at, and in results of former versions."""
    profiled: ProfiledTime | None = None
    """A few steps under the framework's profiler; None where nobody looked, and in results of former versions."""
    launched: Launched | None = None
    """What ranks that a launcher starts have brought; None for one process."""

    @property
    def noise_fraction(self) -> float | None:
        """How far the 95 % interval of plain against plain reaches from 1; None where it was not measured."""
        if self.noise is None or not (math.isfinite(self.noise.low) and math.isfinite(self.noise.high)):
            return None
        return max(self.noise.high - 1, 1 - self.noise.low, 0.0)

    @property
    def tune_command(self) -> str:
        """What to type to tune under the same terms; a budget that `why` was given says nothing of those."""
        return self._tune(self.asked_budget_s if self.command == "tune" else None)

    @property
    def run_command(self) -> str:
        """What to type to run under the plan."""
        named = self.plan_path is not None and self.plan_path != PLAN_FILE
        command = "flatout run" if self.launched is None else "flatout exec"
        if self.plan is not None and not allows(DEFAULT_CLASS, self.plan.class_):
            command += f" --accept {self.plan.class_}"
        return f"{command} --plan {shlex.quote(self.plan_path or '')}" if named else command

    @property
    def retry_command(self) -> str:
        """What to type to tune once more: with twice the budget, or what it really took, where the budget was spent."""
        short_s = self.short_budget_s
        return self.tune_command if short_s is None else self._tune(max(2 * short_s, round(2 * self.tuning_s, -1)))

    def _tune(self, budget_s: float | None) -> str:
        budget = f"--budget {budget_s:.10g}s" if budget_s is not None else ""
        return " ".join(filter(None, ("flatout tune", budget, self.options)))

    @property
    def winner(self) -> Trial | None:
        """The re-measured trial behind the verdict *faster*; None without one."""
        return self.remeasured if self.verdict == "faster" else None

    @property
    def latency(self) -> dict[str, Latency] | None:
        """How long the models took in a call, `plain` and under the `plan`; None where something is trained."""
        if not self.facts.infers:
            return None
        labels = {"plain": "plain"} | ({"plan": label(self.plan.levers)} if self.plan is not None else {})
        found: dict[str, Latency] = {}
        for side, name in labels.items():
            steps = [one for one in self.timeline if one.label == name and one.group != "warm-up"]
            if calls := [one for one in steps if one.call_s is not None]:
                steps_per_s = len(calls) / sum(one.step_s for one in calls)
                found[side] = replace(latency([one.call_s or 0.0 for one in calls]), steps_per_s=steps_per_s)
        return found

    @property
    def against_itself(self) -> bool:
        """Whether plain was measured as if it were a candidate (`tune --levers none`)."""
        return self.remeasured is not None and not self.remeasured.levers

    @property
    def trials_s(self) -> float:
        """Wall seconds that all trials took, without the baseline and the final measurement."""
        return math.fsum(trial.took_s for trial in self.trials)

    @property
    def num_discarded(self) -> int:
        """Pairs of windows that were left out of trials: others, a compilation or a restarted loader disturbed them."""
        again = self.remeasured.num_discarded if self.remeasured else 0
        return sum(trial.num_discarded for trial in self.trials) + again

    @property
    def break_even_runs(self) -> int | None:
        """The run, counted from 1, within which the tuning is earned back; None where never, or not known."""
        if self.break_even_steps is None or not self.steps_in_run:
            return None
        return max(math.ceil(self.break_even_steps / self.steps_in_run), 1)


def save(result: Result, folder: Path) -> None:
    """Write `result.json` into a run folder.

    Raises:
        MachineError: The folder cannot be written.
    """
    files.write(result, folder / FILE)


def load(path: Path) -> Result:
    """The result in a run folder, or of such a file.

    Raises:
        RecordError: Missing, torn, or from a newer version.
    """
    file = path / FILE if path.is_dir() else path
    return files.read(
        Result, file, missing=f"there is no result in `{file.parent}`", newest=FORMAT,
        hint="only `tune` and `why` write one, when they are done: `flatout report` shows the newest here",
    )  # fmt: skip


def summary_of(result: Result) -> dict[str, Any]:
    """What `--json` prints: for `tune` the verdict, for `why` the diagnosis. A number that is not known is None."""
    found: dict[str, Any] = to_json(_tune_summary(result) if result.command == "tune" else _why_summary(result))
    return found


def _tune_summary(result: Result) -> dict[str, Any]:
    won = result.winner if result.plan is not None else None
    return {
        "verdict": result.verdict,
        "goal": result.goal,
        "ratio": won.ratio if won else 1.0,
        "ratio_low": won.ratio_low if won else 1.0,
        "ratio_high": won.ratio_high if won else 1.0,
        "levers": list(won.levers) if won else [],
        "baseline_steps_per_s": result.baseline_steps_per_s,
        "tuned_steps_per_s": result.tuned_steps_per_s,
        "tuning_s": result.tuning_s,
        "break_even_steps": result.break_even_steps,
        "baseline_joules_per_step": result.energy.baseline.joules if result.energy else None,
        "tuned_joules_per_step": result.energy.tuned.joules if won and result.energy and result.energy.tuned else None,
        "reads": _reads(result),
        "profiled": result.profiled,
        "latency": result.latency,
        "plan": result.plan_path,
        "run": result.run,
    }


def _why_summary(result: Result) -> dict[str, Any]:
    return {
        "phases": {name: result.anatomy.share(name) for name in result.anatomy.phases_s},
        "binding": result.diagnosis.binding,
        "bounds": {bound.remedy: bound.ratio for bound in result.diagnosis.bounds},
        "contradictions": list(result.diagnosis.contradictions),
        "steps_per_s": result.baseline_steps_per_s,
        "model_flops_utilization": result.diagnosis.model_flops_utilization,
        "not_observed": list(result.anatomy.not_observed),
        "joules_per_step": result.energy.baseline.joules if result.energy else None,
        "reads": _reads(result),
        "profiled": result.profiled,
        "latency": result.latency,
        "run": result.run,
    }


def _reads(result: Result) -> list[dict[str, Any]] | None:
    if result.reads is None:
        return None
    names = ("file", "line", "code", "reads_per_step", "waited_s")
    return [{name: getattr(site, name) for name in names} for site in result.reads.sites]
