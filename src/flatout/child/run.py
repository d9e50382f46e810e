"""What does the user's own run do at a step boundary? It never waits, and nothing of ours may end it.

In: orders, as they come. Out: the trace: windows of the whole run at little cost, with the levers of the plan engaged.
A run that is only a sample of the script's ends after its steps (`sample_run.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Literal

from flatout.child.conductor import EFFECT_STEPS, Conductor
from flatout.child.orders import Order, SessionSpec
from flatout.frameworks.contract import Framework
from flatout.records.ranks import RankPlace, leave
from flatout.records.trace import Remark

if TYPE_CHECKING:
    from flatout.child.sample_run import SampleRun

EARLY_S = 10.0
"""Until this age of a run its steps are written down every second, later every 5 s: a run that is killed counts."""

STEPS_APART = 8
"""Steps of a window in a run whose steps are taken apart."""

CATCH_UP_EVERY_S = 0.05
"""So long ends of steps are only collected where nothing but their time is wanted; orders are looked for as often."""


class Run(Conductor):
    """The conductor of a run."""

    waits: ClassVar[bool] = False

    def __init__(self, spec: SessionSpec, framework: Framework, rank: RankPlace | None = None) -> None:
        super().__init__(spec, framework, rank)
        self._unproven = set(spec.levers)
        self._sample: SampleRun | None = None
        if spec.stop_after is not None:
            from flatout.child.sample_run import SampleRun

            self._sample = SampleRun(spec, framework, self._rank)

    def _on_claimed(self) -> None:
        self._watch_end()

    def _on_settled(self) -> None:
        if self.spec.levers:
            self._toggle(self.spec.levers, "plan")
        replaced = ", ".join(f"`{name}`" for name in self.framework.patched()) or "nothing"
        self._write(Remark(text=f"replaced in its process: {replaced}", verbose=True))
        self._open_free_window()

    def _on_answered(self) -> None:
        self._open_free_window()

    def _on_many_problems(self) -> None:
        self._give_up()

    def _on_boundary(self) -> None:
        window = self._window
        if self._settled_at is not None and self._trace is None:
            self._rest()
        elif (
            self._settled_at is not None
            and self.num_steps >= self._settled_at + EFFECT_STEPS
            and window is not None
            and window.order.observe == "off"
            and self._order is None
        ):
            self._catch_up_s = self._last_end_s + CATCH_UP_EVERY_S  # of the next steps only their ends are wanted
        if self._sample is not None and self._sample.is_over(self.on_failure):
            self._at_exit()
            leave(0)

    def _rest(self) -> None:
        """Nothing is recorded (any more): go on under the run's levers, without a look at steps."""
        try:
            if self._checking:
                self.framework.engage(self.spec.levers)
            self.framework.coast()
            self._sleeping = True
        except Exception:  # noqa: BLE001
            self._give_up()

    def _open_free_window(self) -> None:
        """In a run: windows without an order, so that the trace shows the whole run at little cost."""
        if self._window or self._awaited or self._trace is None or self._order is not None:
            return
        spec = self.spec
        awaits_first = bool(spec.levers or spec.learns) and not self._num_windows
        observe: Literal["phases", "ends", "off"] = "ends" if spec.keep_losses or awaits_first else "off"
        age_s = time.perf_counter() - self._started_s
        order = Order(
            number=-1,
            kind="window",
            purpose="run",
            levers=self.framework.engaged(),
            limit_s=1.0 if age_s < EARLY_S else 5.0,
            observe="phases" if spec.takes_apart else observe,
            num_steps=STEPS_APART if spec.takes_apart else 2000,
            skip_steps=0,
        )
        if spec.takes_apart:
            self._await_window(order)
        else:  # a step in thousands, and no loss is left out
            self._open_window(order)
