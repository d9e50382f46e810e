"""Is the plan still faster, hours later? Looks at rising distances, and at once when the run's own step time jumps.

In: the windows of a run, as they are written down anyway, and those that were asked for. Out: `Ask`s and `Decision`s.
While the plan is engaged it may be released where it is slower; afterwards it may be engaged again where it is faster.
Time is that of the trace; arithmetic only.

What looking costs is kept: seconds that the run would have been further without it. No look begins while that is more
than `MOST_COST` of the time since the watch began, so that one look too many is the most that it can be over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from flatout.child.pace import Pace, usual_step_s
from flatout.judge.bets import Bets, needed
from flatout.judge.paired import Pair
from flatout.records.trace import Window
from flatout.run.windows_of_run import WINDOW_S, Ask, Sides, steps_in

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Why to look at once when the watch begins.

    Attributes:
        why: In words.
        slow: How many times as long as plain the plan took in the pairs that gave the alarm.
    """

    why: str
    slow: tuple[float, ...] = ()


@dataclass(slots=True)
class _Look:
    """One question: is what is engaged slower than what is not?"""

    why: str
    is_due: bool
    """Whether it was due anyway, and nothing has jumped."""
    far_before: int = 0
    """Pairs before it whose sides were far apart. They count for that alone: no bet was placed on them."""
    bets: Bets = field(default_factory=Bets)
    against: Bets = field(default_factory=Bets)
    ratios: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    """How many times as fast the other side was."""
    num_tried: int = 0
    num_busy: int = 0
    num_compiled: int = 0

    def add(self, pair: Pair[Window], *, engaged: bool) -> None:
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


class Guard:
    """Watches a run from the end of its check on."""

    def __init__(
        self,
        sides: Sides,
        *,
        engaged: bool,
        num_steps: Callable[[], int],
        gap_s: float | None,
        alarm: Alarm | None = None,
    ) -> None:
        """Begin.

        Args:
            sides: What there is to choose from.
            engaged: Whether the plan is, now.
            num_steps: Says how many steps the run has made.
            gap_s: What a step without the plan takes longer, as far as it is known: what a look will cost.
            alarm: Why to look at once; None where it may wait.
        """
        self.engaged = engaged
        self.decisions: list[Decision] = []
        self.cost_s = 0.0
        self._sides = sides
        self._num_steps = num_steps
        self._gap_s = gap_s
        self._pace = Pace()
        self._look: _Look | None = None
        if alarm is not None:
            num_far = len(alarm.slow) if all(times > FAR_APART for times in alarm.slow) else 0
            self._look = _Look(why=alarm.why, is_due=False, far_before=min(num_far, NUM_FAR_APART - 1))
        self._pair: Pair[Window] | None = None
        self._num_looks = 0
        self._lots = random.Random(0)
        self._step_s = 0.1
        self._now_s = 0.0
        self._begun_s: float | None = None
        self._distance_s = FIRST_DISTANCE_S
        self._next_s = FIRST_DISTANCE_S

    # -- what comes in -------------------------------------------------------------------------------------------

    def free(self, window: Window) -> Ask | None:
        """A window that nobody asked for."""
        self._now_s = window.start_s + sum(window.step_s)
        if self._begun_s is None:
            self._begun_s = window.start_s
            self._next_s = window.start_s + self._distance_s
        is_short = sum(window.step_s) < SHORT_WINDOW_S and window.num_steps < MANY_STEPS
        if self._pair is not None or is_short or not window.training_step_s > 0:
            return None
        self._step_s = usual_step_s(window)
        self._follow(window)
        if self._look is None and self._now_s >= self._next_s:
            self._look = _Look(why=DUE, is_due=True)
        return self._next_pair() if self._look is not None and self._may_begin() else None

    def answered(self, window: Window | None) -> Ask | None:
        """What was asked for has been done; None where nothing is asked."""
        pair, look = self._pair, self._look
        if pair is None or look is None:  # it was a decision that has been carried out
            return None
        pair.keep(window)
        if window is not None:
            self._now_s = window.start_s + sum(window.step_s)
        if pair.order:
            return self._ask(pair)
        self._pair = None
        self._charge(pair)
        look.add(pair, engaged=self.engaged)
        verdict = look.verdict(self._num_looks + 1)
        if verdict:
            return self._decide(look, change=verdict == "change")
        return self._next_pair() if self._may_begin() else self._sides.stay(self.engaged)

    def toggled(self, took_s: float) -> None:
        """Levers were engaged or released for a look."""
        self.cost_s += took_s if self._look is not None else 0.0

    # -- how it decides ------------------------------------------------------------------------------------------

    def _follow(self, window: Window) -> None:
        """Compare its step time with those before it."""
        jump = self._pace.follow(window, also_quicker=not self.engaged)
        if jump is not None and (self._look is None or self._look.is_due):
            was_s, is_s = jump
            self._look = _Look(why=f"its steps took {_ms(is_s)} in place of {_ms(was_s)}", is_due=False)

    def _may_begin(self) -> bool:
        """Whether another pair may be asked for, given what looking has cost so far and what the pair will cost."""
        assert self._look is not None
        passed_s = self._now_s - (self._begun_s or 0.0)
        cost_s = self.cost_s
        if self._look.is_due:  # nothing presses: it waits until there is enough for all of it
            gap_s = self._step_s if self._gap_s is None else max(self._gap_s, 0.0)
            cost_s += gap_s * self._num_asked()
        return cost_s <= MOST_COST * passed_s

    def _next_pair(self) -> Ask:
        self._pair = Pair.drawn(self._lots)
        return self._ask(self._pair)

    def _num_asked(self) -> int:
        """Steps of a window: so many as fit, or as it takes where long steps and short ones follow each other."""
        return self._pace.alike(steps_in(WINDOW_S, self._step_s))

    def _ask(self, pair: Pair[Window]) -> Ask:
        """The window of the side whose turn it is."""
        num, fitting = self._num_asked(), steps_in(WINDOW_S, self._step_s)
        ask = self._sides.ask(pair.order[0], self._step_s, WINDOW_S)
        return ask if num == fitting else replace(ask, num_steps=num, limit_s=2 * num * self._step_s)

    def _charge(self, pair: Pair[Window]) -> None:
        """What the pair's window on the other side has cost; where it was the faster one, nothing."""
        own, window = pair.readings.get(self.engaged), pair.readings.get(not self.engaged)
        if pair.step_s is None or own is None or window is None:
            return
        other_s = usual_step_s(window)  # an evaluation that was not recognised is made in any case
        self._gap_s = other_s - usual_step_s(own)
        num_steps = window.num_steps + self._sides.skip_steps(other_s)
        self.cost_s += max(self._gap_s, 0.0) * num_steps

    def _decide(self, look: _Look, *, change: bool) -> Ask:
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
        self._next_s = self._now_s + self._distance_s
        decision = Decision(
            kind=("engaged again" if self.engaged else "released") if change else "kept",
            num_steps=self._num_steps(),
            ratio=median(look.ratios) if look.ratios else None,
            num_pairs=len(look.ratios),
            why=look.why,
            beside=look.beside,
        )
        self.decisions.append(decision)
        return self._sides.stay(self.engaged, decision.text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
