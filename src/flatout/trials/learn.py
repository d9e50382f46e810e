"""How does a run find its own plan while it trains? The search of `tune`, asked of the user's own process in windows.

In: the facts of a run that has settled, and its answers. Out: `Ask`s, one after the other, in the end `Learned`,
and afterwards a plan in the file.
Nothing is thrown away: each window's steps are steps of the training. So only levers that can be toggled between two
steps are tried, and what trying has cost is known at any moment: the time since it began, less what the steps made
meanwhile would have taken under the best set so far.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.frameworks.lever import Lever
from flatout.judge import agreement, paired, stats
from flatout.judge.agreement import Judgement
from flatout.judge.diagnosis import Diagnosis
from flatout.judge.paired import SCREENING, STRETCH, Extent, Pairs
from flatout.records import plan_file
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import PLAN_FILE, Candidate, Plan, Trial
from flatout.records.trace import FOREIGN_LIMIT, Agreement, Levers, Window
from flatout.run.choice import Environment
from flatout.run.controller import Learner
from flatout.run.outcome import Outcome
from flatout.run.run_windows import WindowRequest, WindowResult
from flatout.trials import conclude
from flatout.trials.budget import Size, compiling_s, size_for
from flatout.trials.search import strategy
from flatout.trials.search.screen import AGREES, Answer, screen
from flatout.trials.search.space import Choice, Space, checks_of, space_of, widest_class

MOST_LOST_S = 30.0
"""What trying may cost the run in all, measured against a run that had the best plan from the start."""

MOST_TOOK_S = 90.0
"""How long it may try things where it has not found out yet what that costs: the best may come last."""

WAIT_S, MOST_WAITS = 3.0, 40
"""Where others use the CPU the run goes on plainly for so long, and is looked at again; so many times in all."""

NUM_PLAIN = 8
WINDOW_LIMIT_S = 1.5
"""A window ends here at the latest: a candidate may be many times slower than plain."""

LINE = (
    "learning: levers that can be toggled are tried on this run, whose steps all count; "
    f"it may cost {MOST_LOST_S:.0f} s of them"
)

UNKNOWN = Diagnosis(binding="unknown", sentence="", evidence=(), bounds=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a run has found out about itself.

    Attributes:
        levers: The best set; empty where plain is.
        trials: All that was tried.
        num_steps: Steps made meanwhile.
        took_s: Seconds that it took, all of them training.
        lost_s: How much further the run would be with this set from the start, seconds.
        stopped: Why not everything was tried; empty where it was.
    """

    levers: Levers
    trials: tuple[Trial, ...] = ()
    num_steps: int = 0
    took_s: float = 0.0
    lost_s: float = 0.0
    stopped: str = ""


Asking = Generator[WindowRequest, WindowResult, Learned]


def plan_of(outcome: Outcome, here: Environment, run: str) -> Plan | None:
    """What a run has learned, as a plan for the next; None where its check, or what came later, denies it."""
    learned, header = outcome.learned, outcome.header
    trial = next((t for t in learned.trials if t.levers == learned.levers), None) if learned is not None else None
    compared = stats.compare(outcome.plain_s, outcome.plan_s) if outcome.plain_s else None
    if trial is None or header is None or compared is None or compared.verdict != "faster" or not outcome.is_engaged:
        return None
    won = replace(
        trial, ratio=compared.ratio, ratio_low=compared.low, ratio_high=compared.high, num_pairs=compared.num_pairs
    )
    plain, plan = (1 / stats.summarize(side).median for side in (outcome.plain_s, outcome.plan_s))
    where = here.script, here.arguments
    return conclude.plan_of(won, where, header, here.machine(), steps_per_s=(plain, plan), run=run)


def keep(outcome: Outcome, here: Environment, place: str, say: Callable[[str], None]) -> None:
    """Write the plan that a run has found, where its own windows show that it wins."""
    plan = plan_of(outcome, here, place)
    if plan is None:
        if outcome.learned is not None and outcome.learned.levers:
            say("what was learned is not written as a plan: its windows do not show surely that it wins")
        return
    try:
        plan_file.write(plan, Path(PLAN_FILE))
    except FlatoutError as problem:
        say(f"what was learned was not kept: {problem.error}")
    else:
        say(f"what was learned is in {PLAN_FILE}: the next `flatout run {here.script}` begins with it")


def learner(here: Environment, accept: str) -> Learner:
    """Who tries levers on the run."""
    return lambda facts: Learning(here.registry, here.machine(), Choice(accept=accept), facts).asking()


@dataclass(slots=True)
class Learning:
    """One run that tries levers on itself."""

    levers: Mapping[str, Lever]
    machine: Machine
    choice: Choice
    facts: Facts
    trials: list[Trial] = field(default_factory=list)
    stopped: str = ""
    _size: Size = field(default_factory=lambda: Size(num_steps=5, skip_steps=0, loader_skip_steps=0))
    _plain_s: float = 0.0
    _noise: float = 0.0
    _first: tuple[int, float] | None = None
    """Steps and time at the start."""
    _last: tuple[int, float] = (0, 0.0)
    _others: tuple[int, float] = (0, 0.0)
    """Steps and time of windows that others disturbed: what they took is not what trying has cost."""
    _over: str = ""
    """Why no more windows are asked for."""
    _busy: bool = False
    _num_waits: int = 0
    _waited_s: float = 0.0
    _lots: random.Random = field(default_factory=lambda: random.Random(0))

    def asking(self) -> Asking:
        """Try what may help, until nothing is left or trying has cost what it may."""
        space = yield from self._space()
        yield from self._screen(space)
        while (candidate := strategy.next_candidate(space, self.trials)) is not None:
            yield from self._wait_for_quiet()
            self.stopped = self._why_over(1.0) or self._too_dear(candidate)
            if self.stopped:
                break
            self.trials.append((yield from self._try_out(candidate)))
        best = strategy.best_of(self.trials)
        return Learned(
            levers=best.levers if best is not None else {},
            trials=tuple(self.trials),
            num_steps=self._last[0] - (self._first or self._last)[0],
            took_s=self._last[1] - (self._first or self._last)[1],
            lost_s=self._lost_s(),
            stopped=self.stopped,
        )

    # -- the plain run -------------------------------------------------------------------------------------------

    def _space(self) -> Generator[WindowRequest, WindowResult, Space]:
        """Look at the run as it is: how long its steps take, and how they differ."""
        self._resize((yield from self._windows(1)))
        plain = yield from self._windows(NUM_PLAIN)
        self._resize(plain)
        times = [w.training_step_s for w in plain if w.training_step_s > 0]
        if times:
            self._plain_s = stats.summarize(times).median
        half = len(times) // 2
        if half > 1:
            self._noise = stats.scatter(times[: 2 * half : 2], times[1 : 2 * half : 2])
        toggled = {name: lever for name, lever in self.levers.items() if lever.toggles == "step"}
        return space_of(toggled, self.facts, self.machine, UNKNOWN, self.choice)

    def _windows(self, num: int) -> Generator[WindowRequest, WindowResult, list[Window]]:
        """Plain ones."""
        found = []
        for _ in range(num):
            answer = yield self._ask({}, self._size)
            self._keep(answer)
            found += [answer.window] if answer.window is not None else []
        return found

    def _resize(self, seen: Sequence[Window]) -> None:
        if seen and seen[-1].training_step_s > 0:
            self._size = size_for(seen[-1].training_step_s, None)

    def _wait_for_quiet(self) -> Generator[WindowRequest, WindowResult, None]:
        """Go on plainly while others use the CPU: nothing that is measured then would be worth its cost."""
        while self._busy and self._num_waits < MOST_WAITS:
            self._num_waits += 1
            begun_s = self._last[1]
            num_steps = max(int(WAIT_S / self._plain_s), 1) if self._plain_s > 0 else 1
            self._keep((yield WindowRequest(levers={}, purpose="learn", num_steps=num_steps, limit_s=WAIT_S)))
            self._waited_s += self._last[1] - begun_s

    # -- levers that are switched between two steps --------------------------------------------------------------

    def _screen(self, space: Space) -> Generator[WindowRequest, WindowResult, None]:
        """Find the best set of them."""
        asking = screen(space, self._may_go_on, self._lots)
        answer: Answer | None = None
        while True:
            try:
                ask = asking.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                self.trials += end.value.trials
                if not end.value.is_settled:
                    self.stopped = self._over or "its windows do not tell the levers apart"
                break
            if ask.what == "numbers":
                answer = Answer(judgement=(yield from self._judge(ask.levers, ask.class_)))
            elif ask.what == "batches":  # what a step can switch leaves items alone, or looks after them itself
                answer = Answer(judgement=AGREES)
            else:
                answer = yield from self._screening_window(ask.levers)
        best = strategy.best_of(self.trials)
        if best is not None and not self.stopped and strategy.next_candidate(space, self.trials) is not None:
            pairs = Pairs(noise=self._noise)  # what others that are costly to try stand beside
            if not (yield from self._measure(best.levers, pairs)):
                beside = paired.trial_of(pairs, best.levers, best.class_, best.took_s)
                known = replace(beside, agreement=best.agreement, agreement_detail=best.agreement_detail)
                self.trials[self.trials.index(best)] = known

    def _screening_window(self, levers: Levers) -> Generator[WindowRequest, WindowResult, Answer]:
        yield from self._wait_for_quiet()
        found = yield self._ask(levers, self._size.stretched(self._lots.uniform(1 - STRETCH, 1 + STRETCH)))
        self._keep(found)
        if found.failures:
            return Answer(failure=found.failures[0].message.partition("\n")[0] or found.failures[0].error)
        window = found.window
        return Answer(
            step_s=window.training_step_s if window is not None and window.counts else None,
            disturbed=window.taken_fraction if window is not None else 0.0,
            missing=found.missing if levers else {}, evidence=found.evidence if levers else {},
        )  # fmt: skip

    def _may_go_on(self, gain: float) -> bool:
        self._over = self._why_over(gain)
        return not self._over

    def _why_over(self, gain: float) -> str:
        """Why trying ends here, where the best set so far makes steps so many times as fast; empty where it goes on."""
        if self._num_waits >= MOST_WAITS:
            return "other processes used the CPU"
        return self._too_dear(Candidate(levers={}), gain)

    # -- one candidate -------------------------------------------------------------------------------------------

    def _try_out(self, candidate: Candidate) -> Generator[WindowRequest, WindowResult, Trial]:
        """Measure one candidate beside plain, and compare its numbers where it is faster."""
        class_ = widest_class(candidate.levers, self.levers)
        begun_s = self._last[1]
        pairs = Pairs(noise=self._noise)
        problem = yield from self._measure(candidate.levers, pairs)
        if problem:
            return Trial(levers=candidate.levers, outcome="failed", reason=problem, class_=class_)
        trial = paired.trial_of(pairs, candidate.levers, class_, 0.0)
        if pairs.missing:
            name, why = next(iter(pairs.missing.items()))
            trial = replace(trial, outcome="failed", reason=f"{name} took no effect: {why}")
        elif (trial.ratio or 0.0) > 1.0:
            judgement = yield from self._judge(trial.levers, trial.class_)
            trial = replace(trial, agreement=judgement.verdict, agreement_detail=judgement.detail)
            if judgement.verdict == "disagrees":
                trial = replace(trial, outcome="disagrees", reason=judgement.detail)
        return replace(trial, took_s=self._last[1] - begun_s)

    def _measure(self, levers: Levers, pairs: Pairs) -> Generator[WindowRequest, WindowResult, str]:
        """Pairs of windows until the candidate is known well enough; why it failed, or an empty text."""
        to_beat = strategy.to_beat(self.trials)
        extent = Extent(looks=SCREENING, enough="known", most=2 * SCREENING.at[-1], to_beat=to_beat)
        asked = paired.turns(pairs, extent, self._lots)
        turn = next(asked, None)
        while turn is not None:
            answer = yield self._ask(levers if turn.candidate else {}, self._size.stretched(turn.stretch))
            self._keep(answer)
            if answer.failures:
                return answer.failures[0].message.partition("\n")[0] or answer.failures[0].error
            if turn.candidate:
                pairs.saw(answer.evidence, answer.missing)
            turn = paired.after(asked, answer.window)
            if turn is not None and turn.opens:
                if len(pairs.baseline_s) > 1 and self._lost_s() > MOST_LOST_S:
                    break
                yield from self._wait_for_quiet()
        return ""

    def _judge(self, levers: Levers, class_: str) -> Generator[WindowRequest, WindowResult, Judgement]:
        """Numbers of the run's own steps under the levers, beside plain; everything is put back afterwards."""
        compared = {name: s for name, s in levers.items() if not self.levers[name].checks_itself}
        checks = tuple(c for c in checks_of(compared, self.levers, infers=self.facts.infers) if c != "batches")
        points: list[Agreement] = []
        while True:
            judgement = agreement.judge(points, class_ if checks else "exact", checks)
            if not checks or (len(points) >= 2 and not agreement.needs_more_points(points, judgement)):
                return judgement
            answer = yield WindowRequest(levers=levers, kind="compare", purpose=" ".join(checks))
            self._keep(answer)
            none = Agreement(levers=levers, differences=(), missing="no answer came")
            points.append(answer.agreement or none)

    # -- asking, and what it costs -------------------------------------------------------------------------------

    def _ask(self, levers: Levers, size: Size) -> WindowRequest:
        return WindowRequest(
            levers=levers, purpose="learn", num_steps=size.num_steps, skip_steps=size.skip_steps,
            limit_s=WINDOW_LIMIT_S,
        )  # fmt: skip

    def _keep(self, answer: WindowResult) -> None:
        window = answer.window
        if window is not None:
            was_busy, self._busy = self._busy, window.taken_fraction > FOREIGN_LIMIT
            before, self._last = self._last, (answer.num_steps, window.start_s + sum(window.step_s))
            if self._first is None:
                self._first = before = answer.num_steps - window.num_steps, window.start_s
            if self._busy or was_busy:  # the steps before a window are not told apart
                num_steps, took_s = self._others
                self._others = num_steps + self._last[0] - before[0], took_s + self._last[1] - before[1]

    def _lost_s(self, gain: float = 1.0) -> float:
        """How much further the run would be, had it had the best set so far, or one of that gain, from the start."""
        if self._first is None or not self._plain_s > 0:
            return 0.0
        best = strategy.best_of(self.trials)
        step_s = self._plain_s / max((best.ratio or 1.0) if best is not None else 1.0, gain)
        num_steps = self._last[0] - self._first[0] - self._others[0]
        return max(self._last[1] - self._first[1] - self._others[1] - num_steps * step_s, 0.0)

    def _too_dear(self, candidate: Candidate, gain: float = 1.0) -> str:
        """Why trying ends here; empty where it may go on."""
        more_s, lost_s = compiling_s(candidate, self.levers, self.facts), self._lost_s(gain)
        if lost_s + more_s >= MOST_LOST_S:
            would = f", and compiling would cost {more_s:.0f} s" if more_s else ""
            return f"trying has cost {lost_s:.0f} s of the {MOST_LOST_S:.0f} s that it may{would}"
        took_s = self._last[1] - (self._first or self._last)[1] - self._waited_s
        return f"{took_s:.0f} s were tried" if took_s > MOST_TOOK_S else ""
