"""How are ranks tuned that a launcher of the user's starts? One of them alone, and what wins there on all of them.

In: a launcher's command. Out: a goal under which one rank of it trains by itself, as in a world of one; then a `Result`
whose winner was timed on all ranks beside plain ones, in whole starts by turns, and trained what they train. Ranks
toggle nothing: if they did so at different moments they would wait for each other.
"""

from __future__ import annotations

import math
import os
import random
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace

from flatout.errors import Inconclusive, ScriptError
from flatout.judge import stats
from flatout.judge.agreement import Judgement
from flatout.judge.result import Launched, Result, Verdict
from flatout.records.plan import Outcome, Trial
from flatout.trials import conclude, judged_runs
from flatout.trials import pairs as pairing
from flatout.trials.conduct import Conduct, Goal, Show
from flatout.trials.ends import launcher_failed
from flatout.trials.pairs import SCREENING, Extent, Pairs
from flatout.trials.rank_conduct import COMPARED_STEPS, timed_steps
from flatout.trials.samples_of_runs import FEWEST_STEPS, Sample, Setting, Wanted, take

ALONE: Mapping[str, str] = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0",
    "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip
"""The world of one, as `torch.distributed` reads it from the environment; at port 0 it takes one that is free."""

OF_THE_WORLD = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_")
"""Beginnings of variables that tell of the whole world, and that one rank alone must not believe."""

SEARCH_SHARE = 0.6
"""Of a budget that was asked for, what the search in one rank may take; the rest is for all ranks."""

STATISTICAL = "other random numbers are drawn, so that what was trained is not compared: it was on one rank"


class LaunchedRanks:
    """One launcher's command under measurement.

    Args:
        words: The command.
        setting: What all its runs have in common.
        show: Who is told of progress.
    """

    def __init__(self, words: tuple[str, ...], setting: Setting, show: Show) -> None:
        self._words, self._setting, self._show = words, setting, show
        self._num_runs, self._num_compared = 0, COMPARED_STEPS
        self._begun_s = time.perf_counter()
        self._asked_s: float | None = None
        self._lots = random.Random(0)
        self._plain: Sample
        self._conduct: Conduct
        self._nudged: Sample

    # -- one rank alone ------------------------------------------------------------------------------------------

    def begin(self, goal: Goal) -> Goal:
        """Run the launcher once as it is; the goal under which one of its ranks is tuned alone.

        Raises:
            ScriptError: Its ranks do not train.
            Inconclusive: They make too few steps.
        """
        self._asked_s = goal.budget_s
        self._show.stage(f"ranks as `{self._words[0]}` starts them", 0.0)
        wanted = self._wanted(self._num_compared, keeps=True)
        plain = self._take(wanted)
        if plain.ended and plain.num_steps >= 2 * FEWEST_STEPS:  # a short script: all that it has
            plain.forget()
            self._num_compared = plain.num_steps
            wanted = replace(wanted, num_steps=self._num_compared)
            plain = replace(self._take(wanted), ended=True)
        self._require(plain)
        self._require_world(plain)
        self._show.stage("how far rounding alone moves what they train", 0.0)
        nudged = self._take(replace(wanted, nudged=True, step_guess_s=plain.median_step_s))
        self._require(nudged)
        self._plain, self._nudged = plain, nudged
        choice = replace(goal.choice, ruled_out={**goal.choice.ruled_out, **self._ruled_out()})
        left_s = goal.budget_s and max(SEARCH_SHARE * goal.budget_s - (time.perf_counter() - self._begun_s), 1.0)
        terms = replace(goal.terms, environment=alone(plain.environment()))
        return replace(goal, choice=choice, terms=terms, budget_s=left_s)

    def alone(self, conduct: Conduct) -> Result:
        """What one rank by itself comes to.

        Raises:
            ScriptError: It does not train alone.
            Inconclusive: It cannot be measured.
        """
        self._conduct = conduct
        try:
            return conduct.run()
        except (ScriptError, Inconclusive) as problem:
            hint = (
                "levers are searched on one rank in a world of one; `flatout exec --levers NAMES --` engages those "
                "that you name on all"
            )
            budget_s = conduct.goal.budget_s
            if isinstance(problem, Inconclusive) and budget_s is not None and self._asked_s is not None:
                hint = (
                    f"of the {self._asked_s:.0f} s that were asked for, {budget_s:.0f} s were for the search on one "
                    "rank: a longer `--budget`"
                )
            raise type(problem)(
                f"one rank of `{shlex.join(self._words)}` by itself: {problem.error}", cause=problem.cause, hint=hint
            ) from None

    def _ruled_out(self) -> dict[str, str]:
        if self._num_local == 1:
            return {}
        reason = f"{self._num_local} ranks share the cores of this machine"
        return {name: reason for name, one in self._setting.registry.items() if one.deals_out_cores}

    @property
    def _num_local(self) -> int:
        found = self._plain.environment().get("LOCAL_WORLD_SIZE", "")
        return int(found) if found.isdigit() else self._num_ranks

    @property
    def _num_ranks(self) -> int:
        assert self._plain.header is not None
        return self._plain.header.world_size

    # -- all of them ---------------------------------------------------------------------------------------------

    def confirm(self, found: Result) -> Result:
        """Measure the winner of one rank on all of them; the result is theirs. Ctrl-C keeps what was measured."""
        typed = f"-- {shlex.join(self._words)}"
        found = replace(found, asked_budget_s=self._asked_s, warnings=(*found.warnings, *self._kept_back(found)))
        best = _promising(found)
        if best is None or not best.levers:
            launched = Launched(num_ranks=self._num_ranks)
            short_s = None if found.short_budget_s is None else self._asked_s or found.short_budget_s
            return replace(found, typed=typed, launched=launched, tuning_s=self._spent_s, short_budget_s=short_s)
        trial, stopped = self._on_all(best)
        won = trial if trial.is_won else None
        baseline = trial.baseline_step_s or self._plain.step_s
        step_s = stats.summarize(baseline).median
        tuned_step_s = step_s / won.ratio if won is not None and won.ratio else step_s
        saved_s = step_s - tuned_step_s
        result = replace(
            found, typed=typed, launched=Launched(num_ranks=self._num_ranks, alone=best, num_runs=self._num_runs),
            remeasured=trial, verdict=_verdict(trial), plan=None, baseline_steps_per_s=1 / step_s,
            baseline_spread_fraction=stats.summarize(baseline).spread_fraction, baseline_window_step_s=tuple(baseline),
            tuned_steps_per_s=1 / tuned_step_s, tuning_s=self._spent_s,
            break_even_steps=math.ceil(self._spent_s / saved_s) if saved_s > 0 else None,
            stopped=stopped or found.stopped, short_budget_s=self._asked_s if stopped else found.short_budget_s,
        )  # fmt: skip
        return replace(result, plan=conclude.plan_of(self._conduct, result, won)) if won is not None else result

    def _kept_back(self, found: Result) -> list[str]:
        """That the budget of the search was a part of what was asked for, where it was short."""
        if found.short_budget_s is None or self._asked_s is None:
            return []
        return [
            f"of the {self._asked_s:.0f} s that were asked for, {found.short_budget_s:.0f} s were for the search on "
            "one rank: the launcher had been run twice before, and the rest is kept for all ranks"
        ]

    def _on_all(self, alone: Trial) -> tuple[Trial, str]:
        """The trial of all ranks, and why its timing ended early."""
        begun_s = time.perf_counter()
        label = f"{alone.label} on {self._num_ranks} ranks"
        self._show.stage(f"what {label} train", 0.9)
        pairs, extent, stopped = Pairs(), Extent(looks=SCREENING, enough="clear", purpose="ranks", deadline_s=0), ""
        try:
            sample = self._take(replace(self._wanted(self._num_compared, keeps=True), levers=alone.levers))
            if sample.problem is not None:
                return _without_ratio(alone, "failed", sample.problem.cause, begun_s), ""
            judged = self._judged(sample, alone.class_)
            if judged.verdict != "agrees":
                outcome: Outcome = "disagrees" if judged.verdict == "disagrees" else "inconclusive"
                return replace(
                    _without_ratio(alone, outcome, judged.detail, begun_s),
                    agreement=judged.verdict, agreement_detail=judged.detail,
                ), ""  # fmt: skip
            while not pairing.is_done(pairs, extent) and not stopped:
                self._show.stage(f"{label}: pair {len(pairs.baseline_s) + 1}", 0.95)
                self._pair(pairs, alone)
                enough = len(pairs.baseline_s) >= stats.MIN_PAIRS
                if enough and self._asked_s is not None and self._spent_s > self._asked_s:
                    stopped = f"the budget of {self._asked_s:.0f} s was over"
        except KeyboardInterrupt:
            stopped = "you stopped it"
        except ScriptError as problem:
            return _without_ratio(alone, "failed", problem.cause, begun_s), ""
        if not pairs.baseline_s:
            return _without_ratio(alone, "inconclusive", f"not timed on all ranks: {stopped}", begun_s), stopped
        return _timed(alone, pairs, judged, begun_s), stopped

    def _pair(self, pairs: Pairs, alone: Trial) -> None:
        """Plain ranks and ranks under the levers, in an order drawn by lot."""
        step_s = self._plain.median_step_s
        num_steps = timed_steps(step_s, self._plain.num_steps if self._plain.ended else None)
        candidate_first = self._lots.random() < 0.5
        found: dict[bool, float] = {}
        for under in (True, False) if candidate_first else (False, True):
            wanted = replace(self._wanted(num_steps), step_guess_s=step_s, levers=alone.levers if under else {})
            sample = self._take(wanted)
            sample.forget()
            if not sample.is_timed:
                raise ScriptError(
                    "ranks did not make their steps", hint="",
                    cause=sample.problem.cause if sample.problem is not None else f"{len(sample.step_s)} were seen",
                )  # fmt: skip
            found[under] = sample.median_step_s
        pairs.baseline_s.append(found[False])
        pairs.candidate_s.append(found[True])
        pairs.candidate_first.append(candidate_first)

    def _judged(self, sample: Sample, class_: str) -> Judgement:
        told = judged_runs.compared(self._plain, self._nudged, sample, class_)
        if told.random_states_equal:
            return told.judgement
        if class_ == "statistical":
            return Judgement(verdict="agrees", detail=STATISTICAL)
        return Judgement(verdict="disagrees", detail="random generators end elsewhere than on plain ranks")

    # -- runs ----------------------------------------------------------------------------------------------------

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _wanted(self, num_steps: int, *, keeps: bool = False) -> Wanted:
        return Wanted(num_steps=num_steps, keeps=keeps, launcher=self._words)

    def _take(self, wanted: Wanted) -> Sample:
        self._num_runs += 1
        return take(self._setting, wanted, self._num_runs, self._show.tick)

    def _require(self, sample: Sample) -> None:
        command = shlex.join(self._words)
        if sample.problem is not None and not sample.ended:
            raise launcher_failed(self._words, sample.problem)
        if len(sample.step_s) < FEWEST_STEPS:
            raise Inconclusive(
                f"the ranks of `{command}` make too few training steps",
                cause=f"{len(sample.step_s)} settled ones were seen", hint="give it more epochs for `tune`",
            )  # fmt: skip

    def _require_world(self, plain: Sample) -> None:
        """Ranks must be told of their world by the environment: else one of them cannot be run alone."""
        told = plain.environment()
        num_told = int(next((told[name] for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE") if told.get(name)), "1"))
        if plain.num_trained > num_told:
            command = shlex.join(self._words)
            raise ScriptError(
                f"the ranks of `{command}` cannot be tuned",
                cause=f"{plain.num_trained} processes train, and their environment tells them of {num_told}: the "
                "script starts its ranks itself, so that one of them cannot be run alone",
                hint=f"`flatout exec --levers NAMES -- {command}` engages levers that you name on all of them",
            )


def alone(environment: Mapping[str, str]) -> dict[str, str | None]:
    """What makes a rank with this environment the only one, on top of the user's variables.

    Args:
        environment: What the launcher started its first rank with.
    """
    found: dict[str, str | None] = {
        name: value
        for name, value in environment.items()
        if os.environ.get(name) != value and not name.startswith(("FLATOUT_", *OF_THE_WORLD)) and name not in _OURS
    }
    return {**found, **ALONE}


_OURS = ("PYTHONHASHSEED", "_")


def _without_ratio(alone: Trial, outcome: Outcome, reason: str, begun_s: float) -> Trial:
    return Trial(
        levers=alone.levers, outcome=outcome, reason=reason, class_=alone.class_, remeasured=True,
        took_s=time.perf_counter() - begun_s,
    )  # fmt: skip


def _timed(alone: Trial, pairs: Pairs, judged: Judgement, begun_s: float) -> Trial:
    compared = pairs.compare()
    ratio, low, high = pairs.ratio()
    return Trial(
        levers=alone.levers, outcome=compared.verdict, reason=compared.reason, class_=alone.class_, remeasured=True,
        ratio=ratio, ratio_low=low, ratio_high=high, num_pairs=len(pairs.ratios),
        agreement=judged.verdict, agreement_detail=judged.detail,
        baseline_step_s=tuple(pairs.baseline_s), candidate_step_s=tuple(pairs.candidate_s),
        candidate_first=tuple(pairs.candidate_first), share=pairs.share, evidence=alone.evidence,
        took_s=time.perf_counter() - begun_s,
    )  # fmt: skip


def _promising(found: Result) -> Trial | None:
    """The winner of one rank; also what is faster there, where only its numbers could not be compared by replaying."""
    if found.winner is not None:
        return found.winner
    tried = [t for t in (found.remeasured, *found.trials) if t is not None and t.levers]
    unclear = [t for t in tried if t.outcome == "faster" and t.agreement == "inconclusive"]
    return max(unclear, key=lambda trial: trial.ratio or 0.0, default=None)


def _verdict(trial: Trial) -> Verdict:
    if trial.is_won:
        return "faster"
    return "no difference" if trial.outcome in ("no difference", "slower", "disagrees", "failed") else "inconclusive"
