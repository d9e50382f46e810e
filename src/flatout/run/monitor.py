"""Is the plan still faster, hours later? Looks at rising distances, and at once when the run's own step time jumps.

In: the windows of a run, as they are written down anyway, and those that were asked for. Out: `Ask`s and `Decision`s.
While the plan is engaged it may be released where it is slower; afterwards it may be engaged again where it is faster.
Time is that of the trace; arithmetic only.

What looking costs is kept: seconds that the run would have been further without it. No look begins while that is more
than `MOST_COST` of the time since the watch began, so that one look too many is the most that it can be over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from statistics import median

from flatout.child.pace import Pace, usual_step_s
from flatout.judge.paired import Pair
from flatout.judge.sequential import BettingTest, needed
from flatout.records.trace import Window
from flatout.run.run_windows import WINDOW_S, Sides, WindowRequest, steps_in

ERROR = 0.01
"""How often a run may be wrong in what it releases or engages again, over all its looks together."""

CLEARED = 20.0
"""The evidence that ends a look without a change, as a multiple of even odds."""

FIRST_DISTANCE_S = 30.0
MOST_DISTANCE_S = 3600.0
MOST_COST = 0.01

FAR_APART = 2.0
NUM_FAR_APART = 3
"""Where so many pairs of as many are this far apart nobody waits for more of them: if it was chance, a later look
mends it, and meanwhile the run goes on at the better pace."""

DUE = "a look was due"
MOST_PAIRS = 24
MOST_LEANING_PAIRS = 96
"""So many where what there is speaks for a change, though not surely yet: on a noisy machine 10 % take that long."""

SHORT_WINDOW_S, MANY_STEPS = 0.2, 1000
"""A free window below this says little of the step time, unless it has so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a look came to.

    Attributes:
        kind: `released`, `engaged again`, or `kept` where nothing was changed.
        num_steps: Steps of the run before it.
        ratio: Step time without the plan over that with it, median of the pairs; None without pairs.
        num_pairs: Pairs behind it.
        why: What gave reason to look.
        beside: What was seen beside it: other processes, compilation; empty where nothing.
    """

    kind: str
    num_steps: int
    ratio: float | None
    num_pairs: int
    why: str
    beside: str = ""

    @property
    def text(self) -> str:
        """It in one line, for the trace."""
        ratio = "" if self.ratio is None else f" at {self.ratio:.2f}x"
        beside = f" ({self.beside})" if self.beside else ""
        pairs = f"{self.num_pairs} pair{'s' * (self.num_pairs != 1)} of windows"
        return f"{self.kind}{ratio} in {pairs}, because {self.why}{beside}"


@dataclass(slots=True)
class _Look:
    """One question: is what is engaged slower than what is not?"""

    why: str
    is_due: bool
    """Whether it was due anyway, and nothing has jumped."""
    far_before: int = 0
    """Pairs before it whose sides were far apart. They count for that alone: no bet was placed on them."""
    bets: BettingTest = field(default_factory=BettingTest)
    against: BettingTest = field(default_factory=BettingTest)
    ratios: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    """How many times as fast the other side was."""
    num_tried: int = 0
    num_busy: int = 0
    num_compiled: int = 0

    def add(self, pair: Pair, *, engaged: bool) -> None:
        """A pair of windows is there."""
        self.num_tried += 1
        both = pair.step_s
        if both is None:
            return
        without_s, plan_s = both
        self.ratios.append(without_s / plan_s)
        self.gains.append(plan_s / without_s if engaged else without_s / plan_s)
        won = self.gains[-1] > 1
        self.bets.place(won=won)
        self.against.place(won=not won)
        self.num_busy += pair.is_busy
        self.num_compiled += pair.compiled

    def verdict(self, number: int) -> str:
        """`change`, `stay`, or empty where more pairs are needed."""
        if self.bets.wealth >= needed(ERROR, number):
            return "change"
        if self.gains and len(self.gains) + self.far_before == NUM_FAR_APART and min(self.gains) > FAR_APART:
            return "change"
        most = MOST_LEANING_PAIRS if self.leans else MOST_PAIRS
        if self.against.wealth >= CLEARED or self.num_tried >= most:
            return "stay"
        lost = self.bets.num - self.bets.num_won
        return "stay" if lost > (0 if self.is_due else 2) and lost * 2 >= self.bets.num else ""

    @property
    def leans(self) -> bool:
        """Whether what there is speaks for a change."""
        return bool(self.gains) and median(self.gains) > 1 and self.bets.wealth > 1

    @property
    def beside(self) -> str:
        """What else was seen in its windows."""
        seen = ["other processes used the CPU"] if self.num_busy * 2 > self.num_tried else []
        return "; ".join(seen + (["something was compiled in them"] if self.num_compiled * 2 > self.num_tried else []))


class Monitor:
    """Watches a run from the end of its check on.

    Attributes:
        engaged: Whether the plan is.
        decisions: What its looks have come to.
        cost_s: What looking has cost the run, seconds.
    """

    def __init__(
        self,
        sides: Sides,
        *,
        engaged: bool,
        num_steps: Callable[[], int],
        gap_s: float | None,
        alarm: str = "",
        num_far: int = 0,
    ) -> None:
        """Begin.

        Args:
            sides: What there is to choose from.
            engaged: Whether the plan is, now.
            num_steps: Says how many steps the run has made.
            gap_s: What a step without the plan takes longer, as far as it is known: what a look will cost.
            alarm: Why to look at once; empty where it may wait.
            num_far: Pairs whose sides were far apart that gave the alarm.
        """
        self.engaged = engaged
        self.decisions: list[Decision] = []
        self.cost_s = 0.0
        self._sides = sides
        self._num_steps = num_steps
        self._gap_s = gap_s
        self._pace = Pace()
        self._look = _Look(why=alarm, is_due=False, far_before=min(num_far, NUM_FAR_APART - 1)) if alarm else None
        self._num_looks = 0
        self._lots = random.Random(0)
        self._step_s = 0.1
        self._now_s = self._begun_s = 0.0
        self._distance_s = FIRST_DISTANCE_S
        self._asking = self._watching()
        next(self._asking)

    def free(self, window: Window) -> WindowRequest | None:
        """A window that nobody asked for."""
        return self._asking.send(window)

    def answered(self, window: Window | None) -> WindowRequest | None:
        """What was asked for has been done; None where nothing is asked."""
        return self._asking.send(window)

    def toggled(self, took_s: float) -> None:
        """Levers were engaged or released for a look."""
        self.cost_s += took_s if self._look is not None else 0.0

    def _watching(self) -> Generator[WindowRequest | None, Window | None, None]:
        """Follow free windows, and look where there is reason to: `None` waits for the next of them."""
        next_s = None
        while True:
            window = yield None
            if window is None:
                continue
            self._now_s = window.start_s + sum(window.step_s)
            if next_s is None:
                self._begun_s, next_s = window.start_s, window.start_s + self._distance_s
            is_short = sum(window.step_s) < SHORT_WINDOW_S and window.num_steps < MANY_STEPS
            if is_short or not window.training_step_s > 0:
                continue
            self._step_s = usual_step_s(window)
            jump = self._pace.follow(window, also_quicker=not self.engaged)
            if jump is not None and (self._look is None or self._look.is_due):
                why = f"its steps took {_ms(jump[1])} in place of {_ms(jump[0])}"
                self._look = _Look(why=why, is_due=False)
            if self._look is None and self._now_s >= next_s:
                self._look = _Look(why=DUE, is_due=True)
            while (look := self._look) is not None and self._may_begin(look):
                verdict = yield from self._pair(look)
                if verdict:
                    yield self._decide(look, change=verdict == "change")
                    next_s = self._now_s + self._distance_s
                elif not self._may_begin(look):
                    yield self._sides.stay(self.engaged)

    def _pair(self, look: _Look) -> Generator[WindowRequest, Window | None, str]:
        """Measure a pair; what the look says then, see `_Look.verdict`."""
        pair = Pair.drawn(self._lots)
        while pair.order:
            num = self._pace.alike(fitting := steps_in(WINDOW_S, self._step_s))
            ask = self._sides.ask(pair.order[0], self._step_s, WINDOW_S)
            if num != fitting:  # long steps and short ones follow each other
                ask = replace(ask, num_steps=num, limit_s=2 * num * self._step_s)
            window = yield ask
            pair.keep(window)
            self._now_s = self._now_s if window is None else window.start_s + sum(window.step_s)
        own, other = pair.readings[self.engaged], pair.readings[not self.engaged]
        if pair.step_s is not None and own is not None and other is not None:
            other_s = usual_step_s(other)  # an evaluation that was not recognised is made in any case
            self._gap_s = other_s - usual_step_s(own)
            self.cost_s += max(self._gap_s, 0.0) * (other.num_steps + self._sides.skip_steps(other_s))
        look.add(pair, engaged=self.engaged)
        return look.verdict(self._num_looks + 1)

    def _may_begin(self, look: _Look) -> bool:
        """Whether another pair may be asked for, given what looking has cost so far and what the pair will cost."""
        cost_s = self.cost_s
        if look.is_due:  # nothing presses: it waits until there is enough for all of it
            gap_s = self._step_s if self._gap_s is None else max(self._gap_s, 0.0)
            cost_s += gap_s * self._pace.alike(steps_in(WINDOW_S, self._step_s))
        return cost_s <= MOST_COST * (self._now_s - self._begun_s)

    def _decide(self, look: _Look, *, change: bool) -> WindowRequest:
        """The look is over."""
        self._look = None
        self._num_looks += 1
        if change:
            self.engaged = not self.engaged
            self._pace.forget()
        if change or look.leans:  # as long as there is doubt, it is looked at again soon
            self._distance_s = FIRST_DISTANCE_S
        else:
            self._distance_s = min(2 * self._distance_s, MOST_DISTANCE_S)
        decision = Decision(
            kind=("engaged again" if self.engaged else "released") if change else "kept",
            num_steps=self._num_steps(), ratio=median(look.ratios) if look.ratios else None,
            num_pairs=len(look.ratios), why=look.why, beside=look.beside,
        )  # fmt: skip
        self.decisions.append(decision)
        return self._sides.stay(self.engaged, decision.text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
