"""What does `tune` do, in order, and what does `why`? Baseline, anatomy, counterfactuals, trials, choice, proof.

In: a script and how far to go. Out: trials. The order of work is here; measuring is in `windows` and `starts`,
choosing in `flatout.trials.search.strategy`, judging in `stats`, `agreement` and `diagnosis`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from flatout.errors import Inconclusive, ScriptError
from flatout.frameworks import kind
from flatout.judge import agreement, paired, stats
from flatout.judge.anatomy import Anatomy, dissect
from flatout.judge.paired import SCREENING, Extent, Pairs
from flatout.judge.result import Untried
from flatout.judge.sequential import Looks
from flatout.records.ceilings import Machine
from flatout.records.plan import Candidate, Trial, allows
from flatout.records.trace import Levers
from flatout.run.script import Script
from flatout.trials import windows
from flatout.trials.baseline import Baseline
from flatout.trials.bench import Bench
from flatout.trials.budget import (
    COSTLY_DEFAULT_S,
    DEVICE_DEFAULT_S,
    TUNE_DEFAULTS_S,
    WHY_DEFAULTS_S,
    Budget,
    compiling_s,
)
from flatout.trials.child_failures import CandidateFailed
from flatout.trials.costs import Costs
from flatout.trials.joules import Joules
from flatout.trials.screening import screened
from flatout.trials.search import strategy
from flatout.trials.search.effects import FIRST_WINDOWS
from flatout.trials.search.screen import Screened
from flatout.trials.search.space import WORTH_TRYING, Space, begun_with, checks_of, space_of, widest_class
from flatout.trials.short_runs import Setting
from flatout.trials.starts import Starts
from flatout.trials.terms import Goal, Show

NOISE_PAIRS = stats.RANKED_PAIRS
SCREEN_PAIRS = SCREENING.at[-1]
PROCESS_PAIRS = 4

PROMISED_S = 170.0
MOST_PROMISED_S = 300.0
"""The budget, where nothing was asked for, with a lever that needs a process and promises to be worth it: what its
pairs of processes take, from the first to the second number."""

FINAL_PAIRS = 16
MOST_FINAL_PAIRS = 30
FEWEST_FINAL_PAIRS = SCREEN_PAIRS
"""Pairs of the best that the looks of the report leave their time to: without them all that was spent is lost."""

SCREEN_SHARE = 1 / 15
FINAL_SHARE = 1 / 5
"""Of the budget: what screening one candidate, and measuring the best again, may take where steps are slow."""

LEAST_STEPS = {"why": 7, "tune": 39}
"""Steps that the least of it takes where each window is one step: plain against plain, the anatomy, samples and the
replays; for `tune` also one candidate, its agreement, and the best measured again."""

CLOSE_IN_STARTS = 0.1
"""A candidate that is started whole each time is known where its interval reaches no further: pairs are dear, and what
is chosen is measured again."""

SCREENING_SHARE = 0.6
"""Of the budget: after so much of it no further window is opened to screen levers."""

LOOK_CLOSER_S = 8.0
"""After the search windows that only the report needs are opened for so long at most; each kind once, if there is
time."""

STOPPED = "you stopped it"

FREE_DATA_STEPS = 2 * stats.MIN_PAIRS
LOOKING_SHARE = {"why": 0.45, "tune": 0.15}
"""Of the budget: when it is known well enough where a step goes and what free data would bring; `tune` then tries."""


class Conduct:
    """One `tune` or `why`, from start to result."""

    def __init__(
        self,
        script: Script,
        run_folder: Path,
        machine: Machine,
        goal: Goal,
        show: Show,
        command: Literal["tune", "why"] = "tune",
    ) -> None:
        self.command = command
        self.script = script
        self.run_folder = run_folder
        self.machine = machine
        self.goal = goal
        self.show = show
        self.levers = kind().levers()
        self.bench = Bench(script, run_folder, self.levers, goal.terms)
        self.bench.on_wait = show.tick
        self.bench.cores_quota = machine.cores_quota
        short = command == "why" or goal.exactly is not None
        self.budget = Budget(goal.budget_s, WHY_DEFAULTS_S if short else TUNE_DEFAULTS_S)
        self.bench.deadline_s = self.budget.deadline_s()
        self.trials: list[Trial] = []
        self.untried: list[Untried] = []
        self.stopped = ""
        self.short_budget_s: float | None = None
        self.own: Levers = {}
        """The levers of the plan that is there already, which are tried first."""
        self.judging_s = 0.0
        """The longest that comparing numbers took, which nothing ends early."""
        self.screened = Screened()
        self.tuned_anatomy: Anatomy | None = None
        self.final: Trial | None = None
        self.joules = Joules(self.bench)
        setting = Setting(script=script, registry=self.levers, run_folder=run_folder, terms=goal.terms, machine=machine)
        self.starts = Starts(setting, self._stage, show.tick)
        self.costs = Costs(self.bench, self.starts, self.budget)
        self.plain = Baseline(self.bench, self.budget, machine, run_folder, self._stage)

    @property
    def against_itself(self) -> bool:
        """Whether plain is to be measured as if it were a candidate: `--levers none`."""
        return self.command == "tune" and self.goal.exactly is None and self.goal.choice.only == ()

    def _stage(self, text: str) -> None:
        self.show.stage(text, self.budget.share_spent)

    def run(self) -> None:
        """All of it; what it comes to, `flatout.trials.conclude` says.

        Ctrl-C ends the trying and keeps what was learned; before there is anything, it ends all.

        So does a plain script that cannot be measured any more: what was measured before is not lost with that.
        """
        self.observe()
        if self.command == "why":
            self._look_closer(self.budget.deadline_s(0.7))
        for work in (self.try_all, self._choose) if self.command == "tune" else ():
            try:
                work()
            except (KeyboardInterrupt, ScriptError, Inconclusive) as problem:
                if self.goal.exactly is not None:  # nothing of it is kept, and who asked for it waits no more
                    raise
                if self.final is None or not isinstance(problem, KeyboardInterrupt):
                    told = STOPPED if isinstance(problem, KeyboardInterrupt) else f"{problem.error}: {problem.cause}"
                    self.stopped, self.short_budget_s = told, None
        self._stage("done")

    def _choose(self) -> None:
        """Measure the best again, and look at what changes nothing of that."""
        self.remeasure()
        if self.goal.exactly is None and self.stopped != STOPPED:
            self._look_closer(time.perf_counter() + LOOK_CLOSER_S)

    def _look_closer(self, until_s: float) -> None:
        won = self.final is not None and self.final.is_won  # then no verdict rests on the noise
        num_pairs = self.costs.affordable(2 * stats.MIN_PAIRS if won else NOISE_PAIRS, SCREEN_SHARE, {})
        self.plain.look_closer(min(until_s, self.budget.end_s), num_pairs)

    # -- the plain script ----------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Start the script, see to its budget, and look at it as it is."""
        self._stage("starting the script")
        self.bench.start()  # before the ceilings: a script that fails should not cost ten seconds first
        assert self.bench.facts is not None
        if self.bench.facts.device == "cpu" and self.machine.accelerators:
            there = self.machine.accelerators[0].name
            self.bench.warnings[f"the script trains on the CPU, and this machine has a GPU (`{there}`)"] = None
        self._fit_budget(self.bench.facts.warm_up_step_s, patience=2.0)  # the first take longer
        self._stage("warming up")
        self.bench.settle()
        self._fit_budget(self.bench.step_guess_s)
        self.plain.observe(LOOKING_SHARE[self.command])

    def _fit_budget(self, step_s: float, *, patience: float = 1.0) -> None:
        """The budget that suits steps as long as these; refused where even the least of it would not fit."""
        loaders = self.bench.facts.loaders if self.bench.facts is not None else ()
        num_steps = LEAST_STEPS[self.command] + (FREE_DATA_STEPS if loaders else 0)
        self.budget.suit(num_steps, step_s)
        searches = self.command == "tune" and self.goal.exactly is None
        if searches and self.bench.facts is not None and self.bench.facts.device != "cpu":
            self.budget.allow(DEVICE_DEFAULT_S)
        self.bench.deadline_s = self.budget.deadline_s()
        self.budget.require(num_steps, step_s, self.script.name, patience=patience, taken=self.bench.taken_now)

    # -- trials --------------------------------------------------------------------------------------------------

    def try_all(self) -> None:
        """Try candidates until nothing is left, the rest is not worth it, or the budget is spent."""
        plain = self.plain
        facts = self.bench.facts
        assert facts is not None and plain.diagnosis is not None
        space = space_of(self.levers, facts, self.machine, plain.diagnosis, self.goal.choice)
        self.untried = list(space.untried)
        if self.goal.exactly is not None:
            self.trials.append(self.try_out(Candidate(levers=self.goal.exactly)))
            return
        if self.against_itself:
            self._stage("trying plain as if it were a candidate")
            self.trials.append(self.try_out(Candidate(levers={})))
            return
        space = begun_with(space, self.own)
        if self.budget.left_s < self.costs.pair_s({}) * (FIRST_WINDOWS / 2 + stats.MIN_PAIRS):
            self._end_search(space, is_over=False)
            return
        self._screen(space)
        if strategy.promises_a_process(space):
            pair_s = max(
                (self.costs.pair_s(one.levers) for one in space.singles if self.costs.apart(one.levers)), default=0.0
            )
            self._allow(min(max(PROMISED_S, self.budget.spent_s + 2 * PROCESS_PAIRS * pair_s), MOST_PROMISED_S))
        while (candidate := strategy.next_candidate(space, self.trials, self._worth(space))) is not None:
            if not self._bears(candidate):
                break
            if not self._fits(candidate):
                self._allow(COSTLY_DEFAULT_S)
            self._stage(f"trying {candidate.label}")
            trial = self.try_out(candidate)
            self.trials.append(trial)
            self.show.trial(trial)
        is_open = not self.trials and not self.screened.is_settled
        is_over = not is_open and candidate is None and strategy.next_candidate(space, self.trials) is None
        self._end_search(space, is_over=is_over)

    def _end_search(self, space: Space, *, is_over: bool) -> None:
        """Note what was not tried, and why, where it was not over."""
        if not is_over:
            left = "for more" if self.trials else "for a first candidate"
            told = [f"the budget of {self.budget.total_s:.0f} s was too short {left}", *self.bench.hindrances()]
            self.stopped, self.short_budget_s = "; ".join(told), self.budget.total_s
        known = {name for t in self.trials for name in t.levers} | {u.lever for u in self.untried}
        rest = dict.fromkeys(n for one in space.singles for n in one.levers if n not in known)
        reason = self.stopped or "the search ended before it"
        self.untried += [Untried(lever=name, reason=reason) for name in rest]

    def _allow(self, total_s: float) -> None:
        self.budget.allow(total_s)
        self.bench.deadline_s = self.budget.deadline_s()

    def _screen(self, space: Space) -> None:
        """Find the best set of what can be switched while the script runs, and leave time to measure it again."""
        pair_s = self.costs.pair_s({})
        enough_s = time.perf_counter() + FIRST_WINDOWS / 2 * pair_s
        leaving_s = self.budget.deadline_s() - (FEWEST_FINAL_PAIRS + 2) * pair_s
        until_s = min(self.budget.deadline_s(SCREENING_SHARE), max(leaving_s, enough_s))
        self.screened = screened(self.bench, space, self, self._stage, until_s=until_s)
        self.trials += self.screened.trials
        self.bench.noise = math.sqrt(2) * self.screened.noise
        best, following = strategy.best_of(self.trials), strategy.next_candidate(space, self.trials)
        if best is not None and following is not None and self._bears(following):  # beside which others stand
            self.trials[self.trials.index(best)] = self.beside_plain(best)
        for trial in self.trials:
            self.show.trial(trial)

    def beside_plain(self, best: Trial) -> Trial:
        """The best that screening has found, in pairs: what others are put on top of stands beside them."""
        self._stage(f"{best.label} beside plain")
        begun_s = time.perf_counter()
        try:
            found = self._trial_of(best.levers, best.class_, self._measure(Candidate(levers=best.levers)), begun_s)
        except CandidateFailed as failed:
            found = replace(best, outcome="failed", reason=str(failed), ratio=None)
        return replace(found, agreement=best.agreement, agreement_detail=best.agreement_detail)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether what is left of the budget suffices for a candidate."""
        return self.budget.left_s - self._reserve_s() >= self._least_s(candidate)

    def _bears(self, candidate: Candidate) -> bool:
        """The same, where nothing was asked for of what may be taken for costly ones."""
        usual_s = self.budget.total_s
        if not (bears := self._fits(candidate)):
            self.budget.allow(COSTLY_DEFAULT_S)
            bears, self.budget.total_s = self._fits(candidate), usual_s
        return bears

    def _least_s(self, candidate: Candidate) -> float:
        """Seconds that trying a candidate takes at the least."""
        least_s = stats.MIN_PAIRS * self.costs.pair_s(candidate.levers) + self.judging_s
        return least_s + compiling_s(candidate, self.levers, self.bench.facts, self.trials)

    def _worth(self, space: Space) -> Callable[[Candidate], bool]:
        """Whether a candidate is to be tried: the budget must bear the former plan, which is not the cheapest left."""
        own = None if space.own is None else space.own.key
        return lambda candidate: candidate.key != own or self._bears(candidate)

    def _reserve_s(self) -> float:
        """What measuring the best again will take."""
        best = strategy.best_of(self.trials)
        if best is None or (best.ratio or 0.0) < WORTH_TRYING:  # then whatever is untried comes first
            return 0.0
        num_pairs = PROCESS_PAIRS if self.costs.apart(best.levers) else self._num_final_pairs(best.levers)
        return (num_pairs + 3) * self.costs.pair_s(best.levers) + self._second_s(best) + self.judging_s

    def _second_s(self, best: Trial) -> float:
        """What measuring the next best will take, where it may come to that."""
        second = strategy.second_to(best, self.trials) if best.outcome != "faster" else None
        return FEWEST_FINAL_PAIRS * self.costs.pair_s(second.levers) if second is not None else 0.0

    def _num_final_pairs(self, levers: Levers) -> int:
        return self.costs.affordable(FINAL_PAIRS, FINAL_SHARE, levers, FEWEST_FINAL_PAIRS)

    def try_out(self, candidate: Candidate) -> Trial:
        """Measure one candidate, and judge its numerics where it is fast enough to matter."""
        begun_s = time.perf_counter()
        class_ = widest_class(candidate.levers, self.levers)
        try:
            judgement, class_ = self.judge_first(candidate, class_)
            if judgement is not None and judgement.verdict != "agrees":
                found = Trial(levers=candidate.levers, outcome="inconclusive", class_=class_, reason=judgement.detail)
                return self._with_agreement(found, judgement, begun_s)
            measured = self._measure(candidate)
        except CandidateFailed as failed:
            took_s = time.perf_counter() - begun_s
            return Trial(levers=candidate.levers, outcome="failed", reason=str(failed), class_=class_, took_s=took_s)
        trial = self._trial_of(candidate.levers, class_, measured, begun_s)
        if measured.missing:
            name, why = next(iter(measured.missing.items()))
            return replace(trial, outcome="failed", reason=f"{name} took no effect: {why}")
        if judgement is None and (trial.ratio or 0.0) <= 1.0:
            return trial
        return self._with_agreement(trial, judgement, begun_s)

    def judge_first(self, candidate: Candidate, class_: str) -> tuple[agreement.Judgement | None, str]:
        """Loaders are judged before they are timed, since other items make the timing meaningless.

        Returns the judgement where it is the whole of it or a rejection, and the class that the levers really have
        here: workers that draw other random numbers are statistical, which `--accept` may or may not admit.
        """
        checks = checks_of(candidate.levers, self.levers)
        if self.costs.starts_anew(candidate.levers):
            self.bench.end()
            return self.starts.judge(candidate.levers, class_, self.goal.choice.accept)
        if "batches" not in checks:
            return None, class_
        point = self.bench.agreement(candidate.levers, ("batches",))
        judgement = agreement.judge([point], class_, ("batches",))
        if judgement.verdict == "disagrees" and allows(self.goal.choice.accept, "statistical"):
            class_ = "statistical"
            judgement = agreement.judge([point], class_, ("batches",))
        whole = checks == ("batches",) or judgement.verdict != "agrees"
        return (judgement if whole else None), class_

    def _measure(self, candidate: Candidate) -> Pairs:
        """Screen it."""
        levers = candidate.levers
        deadline_s = self.budget.deadline_s() - self._reserve_s()
        extent = Extent(looks=SCREENING, enough="known", deadline_s=deadline_s, to_beat=strategy.to_beat(self.trials))
        if self.costs.starts_anew(levers):
            extent = replace(extent, close=CLOSE_IN_STARTS, min_pairs=stats.MIN_PAIRS)
        elif self.costs.apart(levers):
            extent = replace(extent, looks=Looks.alike(PROCESS_PAIRS), deadline_s=self.budget.deadline_s())
        else:
            num_pairs = self.costs.affordable(SCREEN_PAIRS, SCREEN_SHARE, levers)
            extent = replace(extent, looks=Looks.alike(SCREENING.at[0], num_pairs))
        return self._measured(levers, extent, "trial")

    def _measured(self, levers: Levers, extent: Extent, purpose: str, pairs: Pairs | None = None) -> Pairs:
        """Pairs of windows; of processes, one with the levers that need one; of starts on ranks and as one process.

        With `pairs` those of processes go on.
        """
        if self.costs.starts_anew(levers):
            self.bench.end()  # nothing else of ours computes meanwhile
            return self.starts.measure(levers, extent)
        if self.costs.apart(levers):
            extent = replace(extent, patience_s=self.budget.overtime_s)
            inside = self.costs.togglable(levers)
            sides, num_steps = (self.costs.apart(levers), inside), self.costs.process_steps()
            return windows.measure_processes(self.bench, sides, extent, num_steps, pairs)
        return windows.measure(self.bench, levers, extent, purpose=purpose)

    def _trial_of(self, levers: Levers, class_: str, measured: Pairs, begun_s: float) -> Trial:
        return paired.trial_of(measured, levers, class_, time.perf_counter() - begun_s)

    def _with_agreement(self, trial: Trial, judged: agreement.Judgement | None, begun_s: float) -> Trial:
        judgement = judged or self.judge(trial.levers, trial.class_)
        changed = replace(
            trial, agreement=judgement.verdict, agreement_detail=judgement.detail, took_s=time.perf_counter() - begun_s
        )
        if judgement.verdict == "disagrees":
            return replace(changed, outcome="disagrees", reason=judgement.detail)
        return changed

    def judge(self, levers: Levers, class_: str) -> agreement.Judgement:
        """Whether the numbers under the levers are those of plain, as far as their class allows."""
        begun_s = time.perf_counter()
        try:
            if self.costs.starts_anew(levers) or checks_of(self.costs.apart(levers), self.levers):
                self.bench.end()  # nothing else of ours computes meanwhile
                return self.starts.judge(levers, class_, self.goal.choice.accept)[0]
            return self._judged_at_a_step(levers, class_)
        except CandidateFailed as failed:
            word: agreement.Word = "inconclusive" if failed.in_doubt else "disagrees"
            return agreement.Judgement(verdict=word, detail=f"broke while being compared: {failed}")
        except Inconclusive as problem:
            return agreement.Judgement(verdict="inconclusive", detail=problem.error)
        finally:
            self.judging_s = max(self.judging_s, time.perf_counter() - begun_s)

    def _judged_at_a_step(self, levers: Levers, class_: str) -> agreement.Judgement:
        """The same, by steps that are replayed under levers and without, in one process."""
        checks = checks_of(levers, self.levers, infers=self.bench.infers)
        if class_ == "statistical":  # the batches were admitted as other ones; the arithmetic must still agree
            class_ = widest_class(levers, self.levers)
            checks = tuple(c for c in checks if c != "batches")
        if not checks:
            return agreement.judge([], class_, ())
        togglable = self.costs.togglable(levers)
        points = [self.bench.agreement(togglable, checks) for _ in range(1 if "answers" in checks else 2)]
        while agreement.needs_more_points(points, agreement.judge(points, class_, checks)):
            if self.budget.left_s < 0:
                raise CandidateFailed("more points were needed than there was time for", in_doubt=True)
            points.append(self.bench.agreement(togglable, checks))
        return agreement.judge(points, class_, checks)

    # -- choice --------------------------------------------------------------------------------------------------

    def remeasure(self) -> None:
        """Measure the best set again in fresh windows: the best of many is partly luck.

        Where it was, the next best has its turn if the search had shown it to be faster: nobody should lose a gain to a
        luckier rival.
        """
        best = self.trials[0] if self.against_itself and self.trials else strategy.best_of(self.trials)
        if best is None:
            return
        second = strategy.second_to(best, self.trials)
        self.final = self._measure_again(best, self._second_s(best))
        if self.final.is_won or second is None:
            return
        found = self._measure_again(second)
        loser, outcome = (best, self.final) if found.is_won else (second, found)
        self.trials[self.trials.index(loser)] = outcome  # that it did not hold stands in its row
        if found.is_won:
            self.final = found

    def _measure_again(self, best: Trial, leave_s: float = 0.0) -> Trial:
        self._stage(f"measuring {best.label} again")
        begun_s, levers = time.perf_counter(), best.levers
        anew, deadline_s = self.costs.starts_anew(levers), self.budget.deadline_s()
        try:
            if anew or self.costs.apart(levers):
                num, begun = self.costs.affordable(stats.RANKED_PAIRS, FINAL_SHARE, levers), self._only_pairs(best)
                looks = Looks.alike(num) if begun is None else Looks.alike(PROCESS_PAIRS, PROCESS_PAIRS + num)
                extent = Extent(looks=looks, enough="clear", deadline_s=deadline_s, min_pairs=stats.MIN_PAIRS)
                measured = self._measured(levers, extent, "winner", begun)
            else:
                pair_s = self.costs.pair_s(levers)
                until_s = deadline_s - leave_s - pair_s  # its anatomy comes afterwards
                extent = Extent(
                    looks=Looks.alike(self._num_final_pairs(levers), MOST_FINAL_PAIRS), enough="clear",
                    deadline_s=until_s, min_pairs=FEWEST_FINAL_PAIRS, patience_s=self.budget.end_s - pair_s - until_s,
                )  # fmt: skip
                measured = self._measured(levers, extent, "winner")
            if not anew:  # which has its windows elsewhere
                self.joules.final_s[best.label] = begun_s, time.perf_counter()
            trial = replace(
                self._trial_of(levers, best.class_, measured, begun_s), remeasured=True,
                agreement=best.agreement, agreement_detail=best.agreement_detail,
            )  # fmt: skip
            same = "answers" in checks_of(levers, self.levers)  # weights and inputs are what they were
            if best.agreement != "agrees" or (not same and self.budget.left_s > self.judging_s):  # once more, later
                trial = self._with_agreement(trial, None, begun_s)
            if not anew and self.budget.share_spent < 1:
                self._take_apart_winner(levers)
        except CandidateFailed as failed:
            trial = replace(best, outcome="failed", reason=f"when measured again: {failed}", remeasured=True)
        self.show.trial(trial)
        return trial

    def _only_pairs(self, best: Trial) -> Pairs | None:
        """The pairs of processes that the search measured, where it was of one candidate alone: nothing was chosen."""
        tried = [trial for trial in self.trials if self.costs.apart(trial.levers)]
        return paired.pairs_of(best) if tried == [best] and not self.costs.starts_anew(best.levers) else None

    def _take_apart_winner(self, levers: Levers) -> None:
        togglable, skip = self.costs.togglable(levers), self.bench.size.loader_skip_steps
        if apart := self.costs.apart(levers):
            if self.budget.left_s < self.costs.pair_s(levers):
                return
            self.bench.start(apart)
        seen = [self.bench.window(togglable, purpose="winner", observe="phases", skip=skip) for _ in range(2)]
        self.tuned_anatomy = dissect(seen)
        if apart:
            self.bench.leave()
