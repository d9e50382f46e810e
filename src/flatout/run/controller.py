"""Who decides about the levers of a run, from its first settled step on? Who learns, then a check, then the guard.

In: what a run has settled to, its answers and its free windows. Out: `WindowRequest`s. Arithmetic only. The check
alternates plan and plain in the run's first windows, in the pairs of `flatout.judge.paired`, and the plan may go.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from typing import Any

from flatout.frameworks.lever import Lever
from flatout.judge import paired
from flatout.judge.paired import Extent, Pair, Pairs
from flatout.judge.sequential import Looks
from flatout.records.facts import Facts
from flatout.records.trace import Levers, Window
from flatout.run.monitor import FAR_APART, Monitor
from flatout.run.run_windows import LIMIT_S, WINDOW_S, Sides, WindowRequest, WindowResult, steps_in

Learner = Callable[[Facts], Generator[WindowRequest, WindowResult, Any]]
"""Makes somebody who tries levers on the run, and returns what came of it, with the best set as `levers`."""

CHECK_PAIRS = 8
"""The fewest that can be judged whatever the noise, see `flatout.judge.stats.RANKED_PAIRS`."""

EXTENT = Extent(looks=Looks.alike(CHECK_PAIRS), enough="all", most=CHECK_PAIRS)

SLOW, MOST_SLOW = 1.5, 2
"""So many disturbed pairs in a row that are this much slower end the check; they follow each other without a rest."""

REST_WINDOWS = 6
"""After each pair the plan runs on for so many windows, so that the check costs a slow script or a short run little."""


class Controller:
    """Over the levers of one process.

    Attributes:
        plan: The levers of the run; what was learned, once something was.
        pairs: What the check has measured: the baseline is plain, the candidate the plan.
        released: Whether the check released the plan.
        guard: Who looks later on; None until the check is over.
        learned: What the learner returned; None where none did.
        is_learning: Whether levers are being tried, any of which may fail.
    """

    def __init__(
        self,
        plan: Levers,
        registry: Mapping[str, Lever],
        *,
        learner: Learner | None = None,
        num_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self.plan = plan
        self.pairs = Pairs()
        self.released = False
        self.guard: Monitor | None = None
        self.learned: Any = None
        self.is_learning = False
        self._registry = registry
        self._learner = learner
        self._num_steps = num_steps
        self._asking: Generator[WindowRequest, WindowResult, None] | None = None

    def begin(self, facts: Facts | None) -> WindowRequest | None:
        """The run has settled, and its plan is engaged where it has one."""
        self._asking = self._first(facts)
        return next(self._asking, None)

    def answered(self, answer: WindowResult) -> WindowRequest | None:
        """What was asked for has been done."""
        if self._asking is not None:
            try:
                return self._asking.send(answer)
            except StopIteration:
                self._asking = None
                return None
        return self.guard.answered(answer.window) if self.guard is not None else None

    def free(self, window: Window) -> WindowRequest | None:
        """A window that nobody asked for."""
        return self.guard.free(window) if self.guard is not None else None

    def broken(self) -> WindowRequest | None:
        """The plan broke and was released: nobody engages it again."""
        looked = self._asking is not None or self.guard is not None
        self._asking = self.guard = None
        return WindowRequest(levers=untoggled(self.plan, self._registry), purpose="run") if looked else None

    def _first(self, facts: Facts | None) -> Generator[WindowRequest, WindowResult, None]:
        """Learn and check, and set the guard; nothing of it where no step can be measured."""
        if facts is not None and facts.not_measured:
            return
        step_s = facts.warm_up_step_s if facts is not None and facts.warm_up_step_s > 0 else 0.1
        if self._learner is not None and facts is not None:
            self.is_learning = True
            found = yield from self._learner(facts)
            self.is_learning, self.learned, self.plan = False, found, found.levers
            step_s = found.took_s / found.num_steps if found.took_s and found.num_steps else step_s
        without = untoggled(self.plan, self._registry)
        if set(without) == set(self.plan):  # nothing can be toggled
            if self.learned is not None:
                yield WindowRequest(levers={}, purpose="run", reason="learned: nothing helps")
            return
        compiles = any(self._registry[name].compiles for name in self.plan)
        sides = Sides(plan=self.plan, without=without, compiles=compiles)
        slow = yield from self._check(sides, step_s)
        compared = self.pairs.compare()
        self.released = not slow and compared.verdict == "slower"
        alarm = ""
        if slow:  # something has come over the run: the check, which waits for calm, is no help
            alarm = "it was far slower than plain in the check at the start"
        elif not self.released and (
            self.pairs.num_busy * 2 > CHECK_PAIRS or (compared.verdict == "inconclusive" and compared.ratio < 1)
        ):
            alarm = "the check at the start did not tell"
        gaps = [plain - plan for plain, plan in zip(self.pairs.baseline_s, self.pairs.candidate_s, strict=True)]
        gap_s = sum(gaps) / len(gaps) * (-1 if self.released else 1) if gaps else None
        num_far = len(slow) if all(times > FAR_APART for times in slow) else 0
        self.guard = Monitor(
            sides, engaged=not self.released, num_steps=self._num_steps, gap_s=gap_s, alarm=alarm, num_far=num_far
        )
        why = f"released: {compared.ratio:.2f}x in {compared.num_pairs} pairs of windows at the start"
        yield sides.stay(plan=not self.released, reason=why if self.released else "")

    def _check(self, sides: Sides, step_s: float) -> Generator[WindowRequest, WindowResult, list[float]]:
        """Measure pairs; how many times as long as plain the plan took in the last ones, where those ended it.

        A disturbed pair counts for nothing, but two that are far slower do.
        """
        asked = paired.turns(self.pairs, EXTENT, random.Random(0))
        turn, slow = next(asked, None), list[float]()
        while turn is not None:
            pair = Pair(order=[turn.candidate, not turn.candidate])
            for plan in (*pair.order,):
                window = (yield sides.ask(plan, step_s)).window
                step_s = window.training_step_s if window is not None and window.training_step_s > 0 else step_s
                pair.keep(window)
                turn = paired.after(asked, window)
            both = pair.step_s
            if both is not None and (pair.is_busy or pair.compiled) and both[1] > SLOW * both[0]:
                slow.append(both[1] / both[0])
                if len(slow) >= MOST_SLOW:
                    return slow
                continue
            slow.clear()
            if turn is not None:  # between two pairs the plan runs on
                num_steps = REST_WINDOWS * steps_in(WINDOW_S, step_s)
                rest = WindowRequest(
                    levers=sides.plan, purpose="run", num_steps=num_steps, limit_s=REST_WINDOWS * LIMIT_S
                )
                window = (yield rest).window
                step_s = window.training_step_s if window is not None and window.training_step_s > 0 else step_s
        return []


def untoggled(levers: Levers, registry: Mapping[str, Lever]) -> Levers:
    """Levers that stay engaged on both sides: those that wait for an epoch or a process, and the partners of these.

    One thread is there because a worker takes a core: with the worker and without it is nothing that plain ever is.
    """
    held = {name for name in levers if registry[name].toggles != "step"}
    held |= {name for name in levers for other in held if name in registry[other].partners}
    return {name: settings for name, settings in levers.items() if name in held}
