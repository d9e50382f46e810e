"""Does the plan hold in this very run? Its first windows alternate between plan and plain, and the plan may go.

In: windows. Out: `Ask`s, and at the end whether the plan stays. Arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.records.trace import Window
from flatout.run.pairs_in_run import LIMIT_S, WINDOW_S, Ask, Pair, Sides, lots, steps_in

CHECK_PAIRS = 8
"""The fewest that can be judged whatever the noise, see `flatout.judge.stats.RANKED_PAIRS`."""

SLOW, MOST_SLOW = 1.5, 2
"""So many disturbed pairs in a row that are this much slower end the check; they follow each other without a rest."""

REST_WINDOWS = 6
"""After each pair the plan runs on for so many windows, so that the check costs a slow script or a short run little."""


@dataclass(slots=True)
class Check:
    """The check at the start of a run.

    Attributes:
        plan_s: Step times of the windows under the plan, paired with `plain_s`.
        plain_s: Step times of the windows without it.
        num_busy: Windows that others disturbed.
        released: Whether the plan was slower.
        over: Whether it is at its end.
        alarm: Why the plan shall be looked at again at once; empty where nothing speaks for it.
        slow: How many times as long as plain it took in the last pairs, where those ended the check.
    """

    sides: Sides
    step_s: float
    plan_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    num_busy: int = 0
    released: bool = False
    over: bool = False
    alarm: str = ""
    slow: list[float] = field(default_factory=list)
    _num: int = 0
    _pair: Pair | None = None
    _draw: object = field(default_factory=lots)

    def begin(self) -> Ask:
        """The first window."""
        return self._next_pair()

    def answered(self, window: Window | None) -> Ask:
        """What comes after an answer; the last ask is the decision."""
        if window is not None and window.training_step_s > 0:
            self.step_s = window.training_step_s
        if self._pair is None:
            return self._next_pair()
        self._pair.keep(window)
        if self._pair.order:
            return self.sides.ask(self._pair.order[0], self.step_s)
        pair, self._pair = self._pair, None
        self._count(pair)
        if len(self.slow) >= MOST_SLOW:  # something has come over the run: the check, which waits for calm, is no help
            self.over, self.alarm = True, "it was far slower than plain in the check at the start"
            return self.sides.stay(plan=True)
        if self._num >= CHECK_PAIRS:
            return self._conclude()
        return self._next_pair() if self.slow else self._rest()

    def _next_pair(self) -> Ask:
        self._num += 1
        self._pair = Pair.drawn(self._draw)  # type: ignore[arg-type]
        return self.sides.ask(self._pair.order[0], self.step_s)

    def _count(self, pair: Pair) -> None:
        self.num_busy += pair.is_busy
        both = pair.step_s
        disturbed = pair.is_busy or pair.compiled
        if both is not None and disturbed and both[0] > SLOW * both[1]:
            self.slow.append(both[0] / both[1])
        else:
            self.slow.clear()
        if both is not None and not disturbed:
            self.plan_s.append(both[0])
            self.plain_s.append(both[1])

    def _rest(self) -> Ask:
        """Between two pairs the plan runs on."""
        num_steps = REST_WINDOWS * steps_in(WINDOW_S, self.step_s)
        return Ask(levers=self.sides.plan, purpose="run", num_steps=num_steps, limit_s=REST_WINDOWS * LIMIT_S)

    def _conclude(self) -> Ask:
        from flatout.judge import stats  # `scipy` takes longer to load than the script may have to wait for its start

        compared = stats.compare(self.plain_s, self.plan_s)
        self.over, self.released = True, compared.verdict == "slower"
        if not self.released:
            if self.num_busy * 2 > CHECK_PAIRS or (compared.verdict == "inconclusive" and compared.ratio < 1):
                self.alarm = "the check at the start did not tell"
            return self.sides.stay(plan=True)
        why = f"released: {compared.ratio:.2f}x in {compared.num_pairs} pairs of windows at the start"
        return self.sides.stay(plan=False, reason=why)
