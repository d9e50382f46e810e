"""Does the plan hold in this very run? Its first windows alternate between plan and plain, and the plan may go.

In: windows. Out: `Ask`s, and at the end whether the plan stays. Arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.run.pairs_in_run import LIMIT_S, WINDOW_S, Ask, Pair, Sides, lots, steps_in
from flatout.trace import Window

CHECK_PAIRS = 8
"""The fewest that can be judged whatever the noise, see `flatout.stats.RANKED_PAIRS`."""

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
        over: Whether it has been decided.
    """

    sides: Sides
    step_s: float
    plan_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    num_busy: int = 0
    released: bool = False
    over: bool = False
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
        return self._rest() if self._num < CHECK_PAIRS else self._conclude()

    def _next_pair(self) -> Ask:
        self._num += 1
        self._pair = Pair.drawn(self._draw)  # type: ignore[arg-type]
        return self.sides.ask(self._pair.order[0], self.step_s)

    def _count(self, pair: Pair) -> None:
        self.num_busy += pair.is_busy
        both = pair.step_s
        if both is not None and not pair.is_busy and not pair.compiled:
            self.plan_s.append(both[0])
            self.plain_s.append(both[1])

    def _rest(self) -> Ask:
        """Between two pairs the plan runs on."""
        num_steps = REST_WINDOWS * steps_in(WINDOW_S, self.step_s)
        return Ask(levers=self.sides.plan, purpose="run", num_steps=num_steps, limit_s=REST_WINDOWS * LIMIT_S)

    def _conclude(self) -> Ask:
        from flatout import stats  # `scipy` takes longer to load than the script may have to wait for its start

        compared = stats.compare(self.plain_s, self.plan_s)
        self.over, self.released = True, compared.verdict == "slower"
        if not self.released:
            return self.sides.stay(plan=True)
        why = f"released: {compared.ratio:.2f}x in {compared.num_pairs} pairs of windows at the start"
        return self.sides.stay(plan=False, reason=why)
