"""What does `tune --ranks` do, in order? What one process trains, what each division trains, and rounds of timed runs.

Then the same for the best division under levers of communication. In: a script, how many ranks at most, a plan whose
levers are engaged. Out: a `RankTuning` without its plan. Every run is a whole start of the script that ends after some
steps; in each round one process and all divisions that are still open run once, in an order drawn by lot.
"""

from __future__ import annotations

import datetime
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from flatout import __version__
from flatout.errors import FlatoutError, Inconclusive, ScriptError
from flatout.judge import rank_tuning, stats
from flatout.judge.agreement import Judgement
from flatout.judge.rank_tuning import RankOutcome, RankTuning
from flatout.records.plan import CLASSES, allows
from flatout.run import choice
from flatout.run.choice import Engagement
from flatout.trials import judged_runs, rank_divisions, rank_levers
from flatout.trials import pairs as pairing
from flatout.trials.conduct import Show
from flatout.trials.pairs import SCREENING, Extent
from flatout.trials.rank_divisions import Division
from flatout.trials.sample_ends import Hung
from flatout.trials.samples_of_runs import FEWEST_STEPS, LEFT_OUT_STEPS, Sample, Setting, Wanted, take

COMPARED_STEPS = 20
"""Steps after which what was trained is compared: enough for momentum and several batches, too few for chaos."""

SETTLING_STEPS = 8
"""About so many steps a run makes before its steps are counted."""

TIMED_S = 2.0
"""Settled steps of a run take about so long."""

FEWEST_TIMED_STEPS, MOST_TIMED_STEPS = 24, 400

DEFAULT_BUDGET_S = 300.0

OVER = 1.2
"""So many times the budget is worth a word."""

OTHER_MASKS = (
    "random generators end elsewhere than in one process, as with dropout, whose masks each rank draws for its part: "
    "class statistical"
)


def timed_steps(step_s: float, longest: int | None) -> int:
    """Steps of a timed run; `longest` are those of a script that has no more.

    >>> timed_steps(0.01, None), timed_steps(0.01, 50), timed_steps(2.0, None)
    (210, 50, 24)
    """
    wanted = SETTLING_STEPS + LEFT_OUT_STEPS + math.ceil(TIMED_S / max(step_s, 1e-5))
    fitting = max(min(wanted, MOST_TIMED_STEPS), FEWEST_TIMED_STEPS)
    return fitting if longest is None else min(fitting, longest)


class RankConduct:
    """One `tune --ranks`, from start to result.

    Args:
        setting: What all runs have in common.
        chosen: The plan whose levers are engaged in timed runs.
        num_ranks: The most ranks.
        budget_s: Aimed wall time; None for the default.
        accept: How far the division may go.
        show: Who is told of progress.
    """

    def __init__(
        self, setting: Setting, chosen: Engagement, num_ranks: int, *, budget_s: float | None, accept: str, show: Show
    ) -> None:
        self._setting, self._chosen, self._num_ranks = setting, chosen, num_ranks
        self._budget_s, self._accept, self._show = budget_s or DEFAULT_BUDGET_S, accept, show
        self._begun_s = time.perf_counter()
        self._lots = random.Random(0)
        self._num_runs = 0
        self._alone: list[Sample] = []
        """The timed runs of one process."""
        self._divisions = [Division.of(num, mode) for num, mode in rank_tuning.candidates(num_ranks)]
        self._remarks: list[str] = []
        self._num_compared = COMPARED_STEPS
        self._stopped = ""

    def run(self) -> RankTuning:
        """All of it. Ctrl-C ends the timing and keeps what was learned.

        Raises:
            ScriptError: One process does not train.
            FlatoutError: See `flatout.errors`.
        """
        plain, nudged = self._references()
        for division in self._divisions:
            self._compare(division, plain, nudged)
        step_s = plain.median_step_s
        num_steps = timed_steps(step_s, longest=None if not plain.ended else plain.num_steps)
        try:
            self._rounds(self._divisions, num_steps, step_s)
            self._judge_left()
            self._try_levers(plain, nudged, num_steps)
        except KeyboardInterrupt:
            if not self._alone:
                raise
            self._stopped = "you stopped it"
        self._judge_left()
        for sample in (plain, nudged):
            sample.forget()
        self._stage("done")
        return self._result(plain)

    # -- runs ----------------------------------------------------------------------------------------------------

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _stage(self, text: str) -> None:
        self._show.stage(text, 1.0 if text == "done" else min(self._spent_s / self._budget_s, 0.99))

    def _take(self, wanted: Wanted) -> Sample:
        self._num_runs += 1
        return take(self._setting, wanted, self._num_runs, self._show.tick)

    # -- is it the same? -----------------------------------------------------------------------------------------

    def _references(self) -> tuple[Sample, Sample]:
        """What one process trains in some steps, and what it trains when it begins in the last place elsewhere."""
        self._stage("what one process trains")
        wanted = Wanted(num_steps=COMPARED_STEPS, keeps=True)
        plain = self._take(wanted)
        if plain.ended and plain.num_steps >= SETTLING_STEPS + FEWEST_STEPS:  # a short script: all that it has
            self._num_compared = plain.num_steps
            wanted = replace(wanted, num_steps=self._num_compared)
            plain.forget()
            plain = replace(self._take(wanted), ended=True)
        self._require(plain)
        self._stage("how far rounding alone moves that")
        nudged = self._take(replace(wanted, nudged=True, step_guess_s=plain.median_step_s))
        self._require(nudged)
        return plain, nudged

    def _require(self, sample: Sample) -> None:
        """One process must get there: nothing can be held against it otherwise."""
        name = self._setting.script.name
        if sample.problem is not None and sample.ended:
            raise Inconclusive(
                f"`{name}` makes too few training steps", cause=sample.problem.cause,
                hint="give it more epochs for `tune`; the plan then serves the shorter run as well",
            )  # fmt: skip
        if isinstance(sample.problem, Hung):
            raise sample.problem
        if sample.problem is not None:
            typed = self._setting.script.typed
            hint = f"`python {typed}` shows the same"
            if "env://" in sample.problem.cause:  # `torch.distributed` finds no launcher's variables
                hint = f"it is distributed already: `flatout tune -- torchrun --nproc-per-node N {typed}`"
            raise ScriptError(f"`{name}` failed as one process", cause=sample.problem.cause, hint=hint)
        if len(sample.step_s) < FEWEST_STEPS:
            raise Inconclusive(
                f"`{name}` makes too few training steps", cause=f"{len(sample.step_s)} settled ones were seen",
                hint="give it more epochs for `tune`; the plan then serves the shorter run as well",
            )  # fmt: skip

    def _compare(self, division: Division, plain: Sample, nudged: Sample) -> None:
        """Run a division for the same steps, and judge what it trains."""
        self._stage(f"what {division.label} train")
        begun_s = time.perf_counter()
        sample = self._take(self._wanted(division, self._num_compared, plain.median_step_s, keeps=True))
        if sample.problem is not None:
            self._end(division, *_without_ratio(sample))
        else:
            judged, class_ = self._judged(plain, nudged, sample, self._class_of(division))
            division.trial = replace(
                division.trial, agreement=judged.verdict, agreement_detail=judged.detail, class_=class_
            )
            if judged.verdict != "agrees":
                outcome: RankOutcome = "disagrees" if judged.verdict == "disagrees" else "inconclusive"
                self._end(division, outcome, judged.detail)
        division.took_s += time.perf_counter() - begun_s
        division.trial = replace(division.trial, step_memory_bytes=sample.step_memory_bytes)
        sample.forget()

    def _wanted(self, division: Division, num_steps: int, step_guess_s: float, *, keeps: bool = False) -> Wanted:
        return Wanted(
            num_ranks=division.num_ranks, mode=division.mode, num_steps=num_steps, step_guess_s=step_guess_s,
            keeps=keeps, levers=division.trial.levers,
        )  # fmt: skip

    def _class_of(self, division: Division) -> str:
        """What it changes, of the same random numbers."""
        classes = [self._setting.registry[name].class_ for name in division.trial.levers]
        return max(("rounding", *classes), key=CLASSES.index)

    def _judged(self, plain: Sample, nudged: Sample, sample: Sample, class_: str) -> tuple[Judgement, str]:
        """Whether a division trains what one process does, and the class of what it changes."""
        told = judged_runs.compared(plain, nudged, sample, class_)
        if told.random_states_equal:
            return told.judgement, class_
        if allows(self._accept, "statistical"):
            return Judgement(verdict="agrees", detail=f"not compared: {OTHER_MASKS}, which is admitted"), "statistical"
        detail = f"{OTHER_MASKS}, which `--accept statistical` admits"
        return Judgement(verdict="disagrees", detail=detail), "statistical"

    def _end(self, division: Division, outcome: RankOutcome, reason: str, cause: str = "", hint: str = "") -> None:
        division.is_open = False
        division.trial = replace(division.trial, outcome=outcome, reason=reason, cause=cause, hint=hint)

    # -- is it faster? -------------------------------------------------------------------------------------------

    def _judge_left(self) -> None:
        for division in self._divisions:
            if division.pairs.baseline_s and division.trial.ratio is None:
                self._judge_time(division)

    def _rounds(
        self, divisions: Sequence[Division], num_steps: int, step_s: float, base: Division | None = None
    ) -> None:
        """Rounds until each division is known well enough; where there is a base, beside that."""
        extent = Extent(looks=SCREENING, enough="clear", purpose="ranks", deadline_s=math.inf)
        num_round = 0
        while any(division.is_open for division in divisions):
            if num_round >= stats.MIN_PAIRS and self._spent_s > self._budget_s:
                self._stopped = f"the budget of {self._budget_s:.0f} s was over"
                break
            if num_round >= 3 * SCREENING.at[-1]:
                break
            num_round += 1
            self._round([d for d in divisions if d.is_open], num_round, num_steps, step_s, base)
            for division in divisions:
                looked_at = division.pairs if base is None else division.gains
                if division.is_open and pairing.is_done(looked_at, extent):
                    division.is_open, division.pairs.share = False, looked_at.share
                    self._judge_time(division)
            if base is None:
                rank_divisions.leave_slower(divisions)

    def _round(
        self, divisions: list[Division], number: int, num_steps: int, step_s: float, base: Division | None
    ) -> None:
        """One process, the base and each division once, in an order drawn by lot."""
        sides: list[Division | None] = [None, *([base] if base is not None else []), *divisions]
        self._lots.shuffle(sides)
        alone: Sample | None = None
        found: list[tuple[Division, Sample]] = []
        for side in sides:
            self._stage(f"round {number}: {'one process' if side is None else side.label}")
            if side is None:
                alone = self._take(Wanted(num_steps=num_steps, step_guess_s=step_s, levers=self._chosen.levers))
                alone.forget()
                if not alone.is_timed:
                    self._require(alone)
                continue
            levers = {**choice.for_ranks(self._chosen, side.mode, self._setting.registry).levers, **side.trial.levers}
            sample = self._take(replace(self._wanted(side, num_steps, step_s), levers=levers))
            sample.forget()
            side.took_s += sample.took_s
            if sample.is_timed:
                found.append((side, sample))
            elif side is not base:
                self._end(side, *_without_ratio(sample))
        assert alone is not None
        self._alone.append(alone)
        beside = next((sample for side, sample in found if side is base), None)
        for division, sample in found:
            if division is base:
                continue
            if beside is not None:
                division.gains.baseline_s.append(beside.median_step_s)
                division.gains.candidate_s.append(sample.median_step_s)
            division.pairs.baseline_s.append(alone.median_step_s)
            division.pairs.candidate_s.append(sample.median_step_s)
            division.samples.append(sample)

    def _judge_time(self, division: Division) -> None:
        division.trial = rank_divisions.timed(division)
        division.trial = rank_levers.with_gain(division)

    # -- levers of communication -----------------------------------------------------------------------------------

    def _try_levers(self, plain: Sample, nudged: Sample, num_steps: int) -> None:
        """On the best division, one lever after the other; what surely wins is what the next one is built on."""
        base = rank_levers.best(self._divisions)
        if base is None or base.sums_share is None:
            return
        is_won = rank_tuning.best_of([division.trial for division in self._divisions]) is not None
        for name, tried, reason in rank_levers.levers_for(base, self._setting, self._accept):
            if reason and not is_won:
                continue  # ranks do not win, and it has nothing to do there
            reason = reason or rank_levers.why_not(base)
            tried = () if reason else tried
            run_s, left_s = self._spent_s / self._num_runs, self._budget_s - self._spent_s
            while tried and rank_levers.took_s(len(tried), run_s) > left_s:
                reason = reason or f"that takes {rank_levers.took_s(1, run_s):.0f} s, and the budget is nearly spent"
                tried = tried[:-1]
            if not tried:
                self._remarks.append(f"`{name}` was not tried on {base.label}: {reason}")
                continue
            base = self._tried(base, [base.under(levers) for levers in tried], (plain, nudged), num_steps)

    def _tried(
        self, base: Division, found: Sequence[Division], references: tuple[Sample, Sample], num_steps: int
    ) -> Division:
        """The best of the base and the same under each lever."""
        self._divisions += found
        for division in found:
            self._compare(division, *references)
        self._rounds(found, num_steps, references[0].median_step_s, base)
        won = [division for division in found if division.trial.is_won]
        return max(won, key=lambda division: division.trial.gain or 0.0, default=base)

    # -- result --------------------------------------------------------------------------------------------------

    def _over(self) -> list[str]:
        """That it took much longer than was asked for, and why."""
        if self._spent_s < OVER * self._budget_s:
            return []
        why = f"{len(self._divisions)} divisions are compared, and run in two to four rounds, whatever that takes"
        return [f"it took {self._spent_s:.0f} s where the budget was {self._budget_s:.0f} s: {why}"]

    def _result(self, plain: Sample) -> RankTuning:
        steps_s = [sample.median_step_s for sample in self._alone] or [plain.median_step_s]
        summary = stats.summarize(steps_s)
        header, script = plain.header, self._setting.script
        assert header is not None
        peaks = [s.peak_memory_bytes for s in (*self._alone, plain) if s.peak_memory_bytes is not None]
        trials = tuple(replace(division.trial, took_s=division.took_s) for division in self._divisions)
        return RankTuning(
            format=rank_tuning.FORMAT, flatout=__version__,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            script=script.name, typed=script.typed, machine=self._setting.machine,
            framework=header.framework, framework_version=header.framework_version,
            num_ranks=self._num_ranks, verdict=rank_tuning.verdict(trials), levers=self._chosen.levers,
            step_s=summary.median, spread_fraction=summary.spread_fraction if summary.num > 1 else math.nan,
            num_steps=max((s.num_steps for s in self._alone), default=self._num_compared),
            num_compared_steps=self._num_compared, num_runs=self._num_runs, trials=trials,
            tuning_s=self._spent_s, remarks=(*self._remarks, *self._over()),
            peak_memory_bytes=max(peaks, default=None), step_memory_bytes=plain.step_memory_bytes,
            stopped=self._stopped,
            run=str(self._setting.run_folder),
        )  # fmt: skip


def _without_ratio(sample: Sample) -> tuple[RankOutcome, str, str, str]:
    """Why a division has no step time."""
    problem: FlatoutError = sample.problem or Inconclusive(
        "too few steps were seen", cause=f"{len(sample.step_s)} settled ones", hint=""
    )
    return ("refused" if sample.refused else "failed"), problem.error, problem.cause, problem.hint
