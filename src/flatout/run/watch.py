"""Who decides about the levers of a run, from its first settled step on? Who learns, then who checks, then who guards.

In: what a run has settled to, its answers and its free windows. Out: `Ask`s. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Levers, Window
from flatout.run.check import Check
from flatout.run.guard import Alarm, Decision, Guard
from flatout.run.windows_of_run import Answer, Ask, Sides

Learner = Callable[[Facts], Generator[Ask, Answer, Any]]
"""Makes somebody who tries levers on the run, and returns what came of it, with the best set as `levers`."""


class Watch:
    """Over the levers of one process.

    Attributes:
        plan: The levers of the run; what was learned, once something was.
        plan_s: Step times of the check's windows under the plan, paired with `plain_s`.
        plain_s: Step times of those without it.
        num_busy: Pairs of the check that others disturbed.
        released: Whether the check released the plan.
        decisions: What was decided later on.
        looking_s: What looking later on has cost the run, seconds.
        learned: What the learner returned; None where none did.
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
        self.plan_s: list[float] = []
        self.plain_s: list[float] = []
        self.num_busy = 0
        self.released = False
        self.decisions: list[Decision] = []
        self.looking_s = 0.0
        self.learned: Any = None
        self._registry = registry
        self._learner = learner
        self._num_steps = num_steps
        self._learning: Generator[Ask, Answer, Any] | None = None
        self._check: Check | None = None
        self._guard: Guard | None = None
        self._step_s = 0.1

    @property
    def is_learning(self) -> bool:
        """Whether levers are being tried, any of which may fail."""
        return self._learning is not None

    def begin(self, facts: Facts | None) -> Ask | None:
        """The run has settled, and its plan is engaged where it has one."""
        if facts is not None and facts.warm_up_step_s > 0:  # not a number fails this, too
            self._step_s = facts.warm_up_step_s
        if self._learner is not None and facts is not None:
            self._learning = self._learner(facts)
            return next(self._learning)
        return self._begin_check()

    def answered(self, answer: Answer) -> Ask | None:
        """What was asked for has been done."""
        if self._learning is not None:
            return self._learn(answer)
        if self._check is not None:
            ask: Ask | None = self._check.answered(answer.window)
            self._note_check(self._check)
            return ask
        if self._guard is None:
            return None
        ask = self._guard.answered(answer.window)
        self.decisions, self.looking_s = self._guard.decisions, self._guard.cost_s
        return ask

    def free(self, window: Window) -> Ask | None:
        """A window that nobody asked for."""
        return self._guard.free(window) if self._guard is not None else None

    def toggled(self, took_s: float) -> None:
        """Levers were engaged or released."""
        if self._guard is not None:
            self._guard.toggled(took_s)

    def broken(self) -> Ask | None:
        """The plan broke and was released: nobody engages it again."""
        looked = self._check is not None or self._guard is not None
        self._check = self._guard = None
        return Ask(levers=untoggled(self.plan, self._registry), purpose="run") if looked else None

    def _learn(self, answer: Answer) -> Ask | None:
        assert self._learning is not None
        try:
            return self._learning.send(answer)
        except StopIteration as end:
            self._learning, self.learned = None, end.value
            self.plan = end.value.levers
        if answer.window is not None and answer.window.training_step_s > 0:
            self._step_s = answer.window.training_step_s
        return self._begin_check() or Ask(levers={}, purpose="run", reason="learned: nothing helps")

    def _begin_check(self) -> Ask | None:
        """Where something of the plan can be toggled."""
        without = untoggled(self.plan, self._registry)
        if set(without) == set(self.plan):
            return None
        compiles = any(self._registry[name].compiles for name in self.plan)
        self._check = Check(Sides(plan=self.plan, without=without, compiles=compiles), self._step_s)
        return self._check.begin()

    def _note_check(self, check: Check) -> None:
        """What the check has come to; when it is over, the guard takes its place."""
        self.plan_s, self.plain_s = check.pairs.candidate_s, check.pairs.baseline_s
        self.num_busy = check.pairs.num_busy
        if not check.over:
            return
        self.released = check.released
        gaps = [plain_s - plan_s for plain_s, plan_s in zip(self.plain_s, self.plan_s, strict=True)]
        gap_s = sum(gaps) / len(gaps) * (-1 if check.released else 1) if gaps else None
        self._check = None
        self._guard = Guard(
            check.sides, engaged=not check.released, num_steps=self._num_steps, gap_s=gap_s,
            alarm=Alarm(why=check.alarm, slow=tuple(check.slow)) if check.alarm else None,
        )  # fmt: skip


def untoggled(levers: Levers, registry: Mapping[str, Lever]) -> Levers:
    """Levers that stay engaged on both sides: those that wait for an epoch or a process, and the partners of these.

    One thread is there because a worker takes a core: with the worker and without it is nothing that plain ever is.
    """
    held = {name for name in levers if registry[name].toggles != "step"}
    held |= {name for name in levers for other in held if name in registry[other].partners}
    return {name: settings for name, settings in levers.items() if name in held}
