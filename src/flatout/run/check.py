"""Does the plan hold in this very run? Its first windows alternate between plan and plain, and the plan may go.

In: windows. Out: `Ask`s, and at the end whether the plan stays. The pairs are those of `flatout.judge.paired`, asked of
the run itself. Arithmetic only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from flatout.judge import paired
from flatout.judge.looks import Looks
from flatout.judge.paired import Extent, Pair, Pairs, Turn, Turns
from flatout.records.trace import Window
from flatout.run.windows_of_run import LIMIT_S, WINDOW_S, Ask, Sides, steps_in

CHECK_PAIRS = 8
"""The fewest that can be judged whatever the noise, see `flatout.judge.stats.RANKED_PAIRS`."""

EXTENT = Extent(looks=Looks.once(CHECK_PAIRS), enough="all", most=CHECK_PAIRS)

SLOW, MOST_SLOW = 1.5, 2
"""So many disturbed pairs in a row that are this much slower end the check; they follow each other without a rest."""

REST_WINDOWS = 6
"""After each pair the plan runs on for so many windows, so that the check costs a slow script or a short run little."""


@dataclass(slots=True)
class Check:
    """The check at the start of a run.

    Attributes:
        pairs: What was measured: the baseline is plain, the candidate the plan.
        released: Whether the plan was slower.
        over: Whether it is at its end.
        alarm: Why the plan shall be looked at again at once; empty where nothing speaks for it.
        slow: How many times as long as plain it took in the last pairs, where those ended the check.
    """

    sides: Sides
    step_s: float
    pairs: Pairs = field(default_factory=Pairs)
    released: bool = False
    over: bool = False
    alarm: str = ""
    slow: list[float] = field(default_factory=list)
    _turns: Turns = field(init=False)
    _turn: Turn | None = None
    _read: dict[bool, Window | None] = field(default_factory=dict)
    _rests: bool = False

    def __post_init__(self) -> None:
        self._turns = paired.turns(self.pairs, EXTENT, random.Random(0))

    def begin(self) -> Ask:
        """The first window."""
        self._turn = next(self._turns)
        return self._ask()

    def answered(self, window: Window | None) -> Ask:
        """What comes after an answer; the last ask is the decision."""
        if window is not None and window.training_step_s > 0:
            self.step_s = window.training_step_s
        if self._rests:
            self._rests = False
            return self._ask()
        assert self._turn is not None
        self._read[self._turn.candidate] = window
        self._turn = paired.after(self._turns, window)
        if len(self._read) < 2:
            return self._ask()
        self._look_at(Pair(order=[], readings=self._read))
        self._read = {}
        if len(self.slow) >= MOST_SLOW:  # something has come over the run: the check, which waits for calm, is no help
            self.over, self.alarm = True, "it was far slower than plain in the check at the start"
            return self.sides.stay(plan=True)
        if self._turn is None:
            return self._conclude()
        return self._ask() if self.slow else self._rest()

    def _ask(self) -> Ask:
        assert self._turn is not None
        return self.sides.ask(self._turn.candidate, self.step_s)

    def _look_at(self, pair: Pair[Window]) -> None:
        """A disturbed pair counts for nothing, but two that are far slower do."""
        both = pair.step_s
        if both is not None and (pair.is_busy or pair.compiled) and both[1] > SLOW * both[0]:
            self.slow.append(both[1] / both[0])
        else:
            self.slow.clear()

    def _rest(self) -> Ask:
        """Between two pairs the plan runs on."""
        self._rests = True
        num_steps = REST_WINDOWS * steps_in(WINDOW_S, self.step_s)
        return Ask(levers=self.sides.plan, purpose="run", num_steps=num_steps, limit_s=REST_WINDOWS * LIMIT_S)

    def _conclude(self) -> Ask:
        compared = self.pairs.compare()
        self.over, self.released = True, compared.verdict == "slower"
        if not self.released:
            if self.pairs.num_busy * 2 > CHECK_PAIRS or (compared.verdict == "inconclusive" and compared.ratio < 1):
                self.alarm = "the check at the start did not tell"
            return self.sides.stay(plan=True)
        why = f"released: {compared.ratio:.2f}x in {compared.num_pairs} pairs of windows at the start"
        return self.sides.stay(plan=False, reason=why)
