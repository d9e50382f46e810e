"""What did the windows of a measurement cost in energy?

In: a bench with its windows, and the counters that the parent noted meanwhile. Out: joules a step of both sides for the
report. A window's start lies on its child's clock; where that begins on ours stands in the child's header.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from flatout.machine.energy_counters import WINDOWS_EVERY_S, EnergyMeter
from flatout.records.energy import Energy, EnergySummary
from flatout.records.plan import Trial
from flatout.records.trace import FOREIGN_LIMIT, Window

if TYPE_CHECKING:
    from flatout.trials.bench import Bench

OUTSIDE_LIMIT = 0.01
"""A window of which evaluation or checkpoints took more than this share is left out: their energy cannot be told apart.

So is one beside others that compute: a package counts everybody's work.
"""


class Joules:
    """The energy of windows.

    Args:
        bench: Has measured them.
        meter: Notes the counters while it is entered.
    """

    def __init__(self, bench: Bench, meter: EnergyMeter | None = None) -> None:
        self._bench = bench
        self.meter = meter or EnergyMeter(WINDOWS_EVERY_S)
        self.final_s: dict[str, tuple[float, float]] = {}
        """When each final measurement began and ended, on our clock, by the label of its levers."""

    @property
    def _device(self) -> str | None:
        return self._bench.facts.device if self._bench.facts is not None else None

    @property
    def _gpus(self) -> tuple[str, ...]:
        return self._bench.facts.gpus if self._bench.facts is not None else ()

    def span(self, child: str, window: Window) -> tuple[float, float] | None:
        """Where a window lies on our clock; None where it cannot count."""
        zero_s, took_s = self._bench.zero_s.get(child), math.fsum(window.step_s)
        outside = math.fsum(window.outside_s) > OUTSIDE_LIMIT * took_s
        if zero_s is None or outside or window.recompilations or window.taken_fraction > FOREIGN_LIMIT:
            return None
        return zero_s + window.start_s, zero_s + window.start_s + took_s

    def per_step(self, purposes: Collection[str], within_s: tuple[float, float] = (-math.inf, math.inf)) -> Energy:
        """One step of either side: the mean over the windows that can tell, of those between two instants of ours."""
        joules, num_steps = 0.0, 0
        why_not = "others, a compilation, evaluation or checkpoints fell into every window"
        for child, window in self._bench.windows:
            if window.purpose in purposes and window.observe == "ends":
                span = self.span(child, window)
                if span is None or span[0] < within_s[0] or span[1] > within_s[1]:
                    continue
                used = self.meter.joules(self._device, *span, every_s=self.meter.every_s, gpus=self._gpus)
                if used.joules is None:
                    why_not = used.why_not
                else:
                    joules, num_steps = joules + used.joules, num_steps + window.num_steps
        return Energy(joules=joules / num_steps) if num_steps else Energy(why_not=why_not)

    def summary(self, final: Trial | None) -> EnergySummary:
        """What was learned about energy, with what was measured again after the choice."""
        found = self.meter.found
        if not found.counters:
            return EnergySummary(baseline=self.meter.joules())
        within_s = self.final_s.get(final.label) if final is not None else None
        return EnergySummary(
            sources=tuple(f"{one.name}: {one.source}" for one in found.counters),
            baseline=self.per_step(("baseline",), within_s) if within_s else self.per_step(("baseline",)),
            tuned=self.per_step(("trial", "winner"), within_s) if within_s else None,
            measuring_joules=self.meter.joules(self._device, gpus=self._gpus).joules,
        )
