"""How are ranks tuned that a launcher of the user's starts? One of them alone, and what wins there on all of them.

In: a launcher's command. Out: a goal under which one rank of it trains by itself, as in a world of one; then a `Result`
whose winner was timed on all ranks beside plain ones, in whole starts by turns, and trained what they train. Ranks
toggle nothing: if they did so at different moments they would wait for each other.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace

from flatout.errors import Inconclusive, ScriptError
from flatout.judge import paired, stats
from flatout.judge.paired import SCREENING, Extent
from flatout.judge.result import Launched, Result, Verdict
from flatout.records.plan import Outcome, Trial
from flatout.trials import conclude
from flatout.trials.child_failures import CandidateFailed
from flatout.trials.conduct import Conduct
from flatout.trials.short_runs import Setting, ShortRun
from flatout.trials.starts import Starts
from flatout.trials.terms import Goal, Show

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


class LaunchedRanks:
    """One launcher's command under measurement.

    Args:
        words: The command.
        setting: What all its runs have in common.
        show: Who is told of progress.
    """

    def __init__(self, words: tuple[str, ...], setting: Setting, show: Show) -> None:
        self._words, self._setting, self._show = words, setting, show
        self._starts = Starts(setting, lambda text: show.stage(text, self._share), show.tick, words)
        self._share = 0.0
        self._begun_s = time.perf_counter()
        self._asked_s: float | None = None
        self._plain: ShortRun

    # -- one rank alone ------------------------------------------------------------------------------------------

    def begin(self, goal: Goal) -> Goal:
        """Run the launcher once as it is; the goal under which one of its ranks is tuned alone.

        Raises:
            ScriptError: Its ranks do not train.
            Inconclusive: They make too few steps.
        """
        self._asked_s = goal.budget_s
        self._plain = self._starts.plain()
        self._require_world(self._plain)
        told = self._plain.environment().get("LOCAL_WORLD_SIZE", "")
        num_local = int(told) if told.isdigit() else self._num_ranks
        reason = f"{num_local} ranks share the cores of this machine"
        sharing = [name for name, one in self._setting.registry.items() if one.deals_out_cores and num_local > 1]
        choice = replace(goal.choice, ruled_out={**goal.choice.ruled_out, **dict.fromkeys(sharing, reason)})
        left_s = goal.budget_s and max(SEARCH_SHARE * goal.budget_s - (time.perf_counter() - self._begun_s), 1.0)
        terms = replace(goal.terms, environment=alone(self._plain.environment()))
        return replace(goal, choice=choice, terms=terms, budget_s=left_s)

    def alone(self, conduct: Conduct) -> None:
        """Measure one rank by itself.

        Raises:
            ScriptError: It does not train alone.
            Inconclusive: It cannot be measured.
        """
        try:
            conduct.run()
        except (ScriptError, Inconclusive) as problem:
            hint = (
                "levers are searched on one rank in a world of one, for which a part of the budget is; `flatout exec "
                "--levers NAMES --` engages those that you name on all"
            )
            raise type(problem)(
                f"one rank of `{shlex.join(self._words)}` by itself: {problem.error}", cause=problem.cause, hint=hint
            ) from None

    @property
    def _num_ranks(self) -> int:
        assert self._plain.header is not None
        return self._plain.header.world_size

    # -- all of them ---------------------------------------------------------------------------------------------

    def confirm(self, found: Result) -> Result:
        """Measure the winner of one rank on all of them; the result is theirs. Ctrl-C keeps what was measured."""
        typed = f"-- {shlex.join(self._words)}"
        found = replace(found, asked_budget_s=self._asked_s)
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
            found, typed=typed,
            launched=Launched(num_ranks=self._num_ranks, alone=best),
            remeasured=trial, verdict=_verdict(trial), plan=None, baseline_steps_per_s=1 / step_s,
            baseline_spread_fraction=stats.summarize(baseline).spread_fraction, baseline_window_step_s=tuple(baseline),
            tuned_steps_per_s=1 / tuned_step_s, tuning_s=self._spent_s,
            break_even_steps=math.ceil(self._spent_s / saved_s) if saved_s > 0 else None,
            stopped=stopped or found.stopped, short_budget_s=self._asked_s if stopped else found.short_budget_s,
        )  # fmt: skip
        if won is None:
            return result
        script, speeds = self._setting.script, (1 / step_s, 1 / tuned_step_s)
        return replace(result, plan=conclude.plan_of(
            won, (script.name, script.arguments), found.header, found.machine, steps_per_s=speeds, run=found.run
        ))  # fmt: skip

    def _on_all(self, alone: Trial) -> tuple[Trial, str]:
        """The trial of all ranks, and why its timing ended early."""
        begun_s = time.perf_counter()
        label = f"{alone.label} on {self._num_ranks} ranks"
        self._share = 0.9
        self._show.stage(f"what {label} train", self._share)
        deadline_s = math.inf if self._asked_s is None else self._begun_s + self._asked_s
        extent = Extent(looks=SCREENING, enough="clear", deadline_s=deadline_s, min_pairs=stats.MIN_PAIRS)
        try:
            judged, _ = self._starts.judge(alone.levers, alone.class_, alone.class_)
            if judged.verdict != "agrees":
                outcome: Outcome = "disagrees" if judged.verdict == "disagrees" else "inconclusive"
                return replace(
                    _without_ratio(alone, outcome, judged.detail, begun_s),
                    agreement=judged.verdict, agreement_detail=judged.detail,
                ), ""  # fmt: skip
            self._show.stage(f"{label} beside plain ones", 0.95)
            pairs = self._starts.measure(alone.levers, extent)
        except KeyboardInterrupt:
            stopped = "you stopped it"
            return _without_ratio(alone, "inconclusive", f"not timed on all ranks: {stopped}", begun_s), stopped
        except (CandidateFailed, ScriptError) as problem:
            return _without_ratio(alone, "failed", str(problem), begun_s), ""
        trial = paired.trial_of(pairs, alone.levers, alone.class_, time.perf_counter() - begun_s)
        return replace(
            trial, remeasured=True, agreement=judged.verdict, agreement_detail=judged.detail,
            evidence={**alone.evidence, **pairs.evidence},
        ), pairs.given_up  # fmt: skip

    # -- runs ----------------------------------------------------------------------------------------------------

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _require_world(self, plain: ShortRun) -> None:
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
