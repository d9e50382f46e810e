"""How is a candidate measured in whole starts: as one process and on ranks, or as a launcher starts it, by turns?

In: a script, levers. Out: `Pairs`, and whether the same is trained. Every start ends after some steps and leaves
nothing; the median of rank 0's settled steps is what is compared. Ranks toggle nothing: if they did so at different
moments they would wait for each other.
"""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Callable
from dataclasses import replace

from flatout.errors import FlatoutError, Inconclusive, ScriptError
from flatout.frameworks import kind
from flatout.frameworks.lever import ranks_of
from flatout.judge import agreement, paired, stats
from flatout.judge.agreement import Judgement
from flatout.judge.paired import Extent, Pairs
from flatout.records.plan import Candidate, allows
from flatout.records.trace import Agreement, Levers, Window
from flatout.report import words
from flatout.trials.child_failures import CandidateFailed, Hung, launcher_failed
from flatout.trials.short_runs import FEWEST_STEPS, LEFT_OUT_STEPS, Setting, ShortRun, Wanted, take

CHECKS = ("losses", "parameters")

COMPARED_STEPS = 20
"""Steps after which what was trained is compared: enough for momentum and several batches, too few for chaos."""

SETTLING_STEPS = 8
"""About so many steps a run makes before its steps are counted."""

TIMED_S = 2.0
"""Settled steps of a run take about so long."""

FEWEST_TIMED_STEPS, MOST_TIMED_STEPS = 24, 400

OTHER_MASKS = (
    "random generators end elsewhere than without, as with dropout, whose masks each rank draws for its part: class "
    "statistical"
)


def timed_steps(step_s: float, longest: int | None) -> int:
    """Steps of a timed run; `longest` are those of a script that has no more.

    >>> timed_steps(0.01, None), timed_steps(0.01, 50), timed_steps(2.0, None)
    (210, 50, 24)
    """
    wanted = SETTLING_STEPS + LEFT_OUT_STEPS + math.ceil(TIMED_S / max(step_s, 1e-5))
    fitting = max(min(wanted, MOST_TIMED_STEPS), FEWEST_TIMED_STEPS)
    return fitting if longest is None else min(fitting, longest)


class Starts:
    """A script that is started again and again.

    Args:
        setting: What all starts have in common.
        stage: Told what is going on.
        tick: Called while a start is waited for.
        launcher: The command that starts ranks of the script's own; empty: flatout starts what there is.
    """

    def __init__(
        self, setting: Setting, stage: Callable[[str], None], tick: Callable[[], None], launcher: tuple[str, ...] = ()
    ) -> None:
        self._setting, self._stage, self._tick, self._launcher = setting, stage, tick, launcher
        self._num_runs = 0
        self._num_compared = COMPARED_STEPS
        self._references: tuple[ShortRun, ShortRun] | None = None
        self._judged: dict[object, tuple[Judgement, str]] = {}
        self._step_memory: dict[object, int | None] = {}
        """What a rank holds within a step, by candidate."""
        self._run_s = 0.0
        """What the longest start took."""
        self._lots = random.Random(0)

    @property
    def who(self) -> str:
        """What is started, in words."""
        return f"the ranks of `{shlex.join(self._launcher)}`" if self._launcher else f"`{self._setting.script.name}`"

    # -- the plain script ----------------------------------------------------------------------------------------

    def plain(self) -> ShortRun:
        """What is trained without levers in some steps; started once.

        Raises:
            ScriptError: It does not train.
            Inconclusive: It makes too few steps.
        """
        return self._refer()[0]

    def _refer(self) -> tuple[ShortRun, ShortRun]:
        """What is trained plainly, and what is trained with parameters moved in their last places."""
        if self._references is not None:
            return self._references
        self._stage(f"what {self.who} trains by itself")
        wanted = self._wanted({}, self._num_compared, keeps=True)
        plain = self._take(wanted)
        if plain.ended and plain.num_steps >= 2 * FEWEST_STEPS:  # a short script: all that it has
            self._num_compared = plain.num_steps
            wanted = replace(wanted, num_steps=self._num_compared)
            plain.forget()
            plain = replace(self._take(wanted), ended=True)
        self._require(plain)
        self._stage("how far rounding alone moves that")
        nudged = self._take(replace(wanted, nudged=True, step_guess_s=plain.median_step_s))
        self._require(nudged)
        self._references = plain, nudged
        return plain, nudged

    def _require(self, sample: ShortRun) -> None:
        """The plain script must get there: nothing can be held against it otherwise."""
        problem, script = sample.problem, self._setting.script
        if problem is not None and not sample.ended:
            if isinstance(problem, Hung):
                raise problem
            if self._launcher:
                raise launcher_failed(self._launcher, problem)
            hint = f"`python {script.typed}` shows the same"
            if "env://" in problem.cause:  # `torch.distributed` finds no launcher's variables
                hint = f"it is distributed already: `flatout tune -- torchrun --nproc-per-node N {script.typed}`"
            raise ScriptError(f"`{script.name}` failed as one process", cause=problem.cause, hint=hint)
        if len(sample.step_s) < FEWEST_STEPS:
            raise Inconclusive(
                f"{self.who} makes too few training steps",
                cause=f"{len(sample.step_s)} settled ones were seen",
                hint="give it more epochs for `tune`; the plan then serves the shorter run as well",
            )

    # -- a candidate ---------------------------------------------------------------------------------------------

    def judge(self, levers: Levers, class_: str, accept: str) -> tuple[Judgement, str]:
        """Whether a candidate trains what the plain script does, and the class of what it changes; started once.

        Raises:
            CandidateFailed: It is refused, or does not get there.
        """
        key = Candidate(levers=levers).key
        if key not in self._judged:
            self._judged[key] = self._compared(levers, class_, accept)
        return self._judged[key]

    def _compared(self, levers: Levers, class_: str, accept: str) -> tuple[Judgement, str]:
        plain, nudged = self._refer()
        wanted = self._wanted(levers, self._num_compared, keeps=True)
        sample = self._take(replace(wanted, step_guess_s=plain.median_step_s))
        try:
            if sample.problem is not None:
                raise CandidateFailed(_why(sample.problem))
            self._step_memory[Candidate(levers=levers).key] = sample.step_memory_bytes
            return _told((plain, nudged, sample), class_, accept)
        finally:
            sample.forget()

    def measure(self, levers: Levers, extent: Extent) -> Pairs:
        """Measure pairs of starts, one under the levers and one without.

        Raises:
            CandidateFailed: It did not make its steps under the levers.
            ScriptError: It did not make them without.
        """
        plain = self.plain()
        step_s = plain.median_step_s
        num_steps = timed_steps(step_s, plain.num_steps if plain.ended else None)
        pairs = Pairs()
        samples: list[ShortRun] = []
        asked = paired.turns(pairs, extent, self._lots)
        turn = next(asked, None)
        while turn is not None:
            under = levers if turn.candidate else {}
            sample = self._take(replace(self._wanted(under, num_steps), step_guess_s=step_s))
            sample.forget()
            if not sample.is_timed and not turn.candidate:
                self._require(sample)
            if not sample.is_timed:
                raise CandidateFailed(_why(sample.problem) if sample.problem else "too few settled steps were seen")
            samples += [sample] if turn.candidate else []
            turn = paired.after(asked, Window(
                index=0, purpose="trial", levers=under, observe="ends", step_s=(sample.median_step_s,),
                outside_s=(0.0,), start_s=0.0, peak_memory_bytes=sample.peak_memory_bytes,
            ))  # fmt: skip
        pairs.evidence |= self._evidence(levers, samples)
        return pairs

    def _evidence(self, levers: Levers, samples: list[ShortRun]) -> dict[str, str]:
        """What ranks exchanged, in words."""
        shares = [one.exchanges.least_share for one in samples if one.exchanges is not None]
        dividing = next((name for name in levers if self._setting.registry[name].divides), None)
        if dividing is None or not shares:
            return {}
        kinds = samples[-1].exchanges.kinds if samples[-1].exchanges is not None else {}
        told = f"exchanges that nothing hid took {words.percent(stats.summarize(shares).median)} of training"
        told += f", most of it {max(kinds, key=lambda kind: kinds[kind])}" if kinds else ""
        memory, alone = self._step_memory.get(Candidate(levers=levers).key), self.plain().step_memory_bytes
        if memory is not None and alone is not None:
            told += f"; a rank held {words.memory(memory)} within a step, one process {words.memory(alone)}"
        return {dividing: told}

    def pair_s(self, levers: Levers, step_s: float) -> float:
        """About what a pair takes, seconds."""
        num_ranks, _ = self._ranks(levers)
        return 2 * max(self._run_s, 3.0 * max(num_ranks, 1) + timed_steps(step_s, None) * step_s)

    # -- starting ------------------------------------------------------------------------------------------------

    def _ranks(self, levers: Levers) -> tuple[int, str]:
        return ranks_of(levers, self._setting.registry) or (1, "auto")

    def _wanted(self, levers: Levers, num_steps: int, *, keeps: bool = False) -> Wanted:
        num_ranks, mode = self._ranks(levers)
        own = {n: s for n, s in levers.items() if not self._setting.registry[n].divides}
        return Wanted(
            num_ranks=num_ranks, mode=mode, num_steps=num_steps, levers=own, keeps=keeps, launcher=self._launcher
        )

    def _take(self, wanted: Wanted) -> ShortRun:
        self._num_runs += 1
        found = take(self._setting, wanted, self._num_runs, self._tick)
        self._run_s = max(self._run_s, found.took_s)
        return found


def _why(problem: FlatoutError) -> str:
    return f"{problem.error}: {problem.cause}" if problem.cause else problem.error


def _told(samples: tuple[ShortRun, ShortRun, ShortRun], class_: str, accept: str) -> tuple[Judgement, str]:
    """Hold what was trained against the plain start, beside what rounding moves: plain, nudged, candidate."""
    plain, nudged, sample = samples
    states = plain.state("last"), nudged.state("last"), sample.state("last"), plain.state("first")
    try:
        found = kind().trained_apart(*states)
    except (OSError, RuntimeError) as problem:
        return Judgement(verdict="inconclusive", detail=f"what was trained was not kept: {problem}"), class_
    if all(one.random_states_equal for one in found):
        found += kind().losses_apart(plain.losses, nudged.losses, sample.losses)
        return agreement.judge([Agreement(levers={}, differences=found)], class_, CHECKS), class_
    if class_ == "statistical" or allows(accept, "statistical"):
        return Judgement(verdict="agrees", detail=f"not compared: {OTHER_MASKS}, which is admitted"), "statistical"
    detail = f"{OTHER_MASKS}, which `--accept statistical` admits"
    return Judgement(verdict="disagrees", detail=detail), "statistical"
