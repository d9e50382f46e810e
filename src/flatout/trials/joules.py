"""What did the windows of a measurement cost in energy?

In: a bench with its windows, and the counters that the parent noted meanwhile. Out: joules a step of both sides of a
trial, and the summary for the report. A window's start lies on its child's clock; where that begins on ours stands in
the child's header, and on Linux both are the same clock.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import Inconclusive
from flatout.machine.energy_counters import WINDOWS_EVERY_S, EnergyMeter
from flatout.records.energy import MIN_UPDATES, Curves, Device, Energy, EnergySummary, Span, save
from flatout.records.plan import label
from flatout.records.trace import FOREIGN_LIMIT, Levers, Window

if TYPE_CHECKING:
    from flatout.trials.bench import Bench
    from flatout.trials.conduct import Conduct

FILE = "energy.json"
"""The log, in the run folder."""

OUTSIDE_LIMIT = 0.01
"""A window of which evaluation or checkpoints took more than this share is left out: their energy cannot be told apart.

So is one beside others that compute: a package counts everybody's work.
"""

PLAIN = ("baseline", "plain energy")
TRIED = ("trial", "winner", "energy")
"""Purposes of the windows of either side."""

LONGEST_S = 20.0
"""A window that is made for its energy alone is not longer than this."""

ROOM = 1.5
"""Such a window is so many times as long as its counter needs."""


class Joules:
    """The energy of windows.

    Args:
        bench: Has measured them.
        meter: Notes the counters.
    """

    def __init__(self, bench: Bench, meter: EnergyMeter | None = None) -> None:
        self._bench = bench
        self._meter = meter or EnergyMeter(WINDOWS_EVERY_S)
        self._sides: dict[str, tuple[Energy, Energy]] = {}
        """Of each set of levers that was measured, the newest: a plain step, and one under the levers."""

    @contextlib.contextmanager
    def noted(self, run_folder: Path) -> Iterator[None]:
        """Note the counters meanwhile, and keep the log beside the traces that it belongs to."""
        with self._meter:
            yield
        if self._meter.log().series:
            with contextlib.suppress(OSError):  # a full disk shows in what matters more
                save(self._meter.log(), run_folder / FILE)

    def _devices(self) -> tuple[Device, ...]:
        """What counts for a script: an idle GPU is not part of what runs on the processor."""
        facts = self._bench.facts
        return ("cpu", "memory") if facts is None or facts.device == "cpu" else ("cpu", "memory", "gpu")

    def _curves(self) -> Curves:
        return Curves(self._meter.log(), self._devices())

    def _span(self, child: str, window: Window) -> Span | None:
        """Where a window lies on our clock; None where it cannot count."""
        zero_s = self._bench.zero_s.get(child)
        took_s = math.fsum(window.step_s)
        outside = math.fsum(window.outside_s) > OUTSIDE_LIMIT * took_s
        if zero_s is None or outside or window.recompilations or (window.foreign_fraction or 0.0) > FOREIGN_LIMIT:
            return None
        return Span(start_s=zero_s + window.start_s, end_s=zero_s + window.start_s + took_s, num_steps=window.num_steps)

    def _per_step(self, *, plain: bool, since_s: float = 0.0) -> Energy:
        """One step of either side, in windows that began after an instant of our clock."""
        purposes = PLAIN if plain else TRIED
        spans = [
            span
            for child, window in self._bench.windows
            if window.purpose in purposes
            and window.observe == "ends"
            and (span := self._span(child, window)) is not None
            and span.start_s >= since_s
        ]
        if not spans:
            return Energy(why_not="others, a compilation, evaluation or checkpoints fell into every window")
        return self._curves().per_step(spans)

    def beside(self, levers: Levers, since_s: float) -> dict[str, Any]:
        """The fields of a trial that was measured since an instant of `time.perf_counter`."""
        if not self._meter.log().series:
            return {}
        plain, found = self._per_step(plain=True, since_s=since_s), self._per_step(plain=False, since_s=since_s)
        self._sides[label(levers)] = plain, found
        if plain.joules is None or found.joules is None:
            return {"why_no_energy": plain.why_not or found.why_not}
        return {"baseline_joules_per_step": plain.joules, "candidate_joules_per_step": found.joules}

    def weigh(self, levers: Levers) -> None:
        """Measure a window of each side for its energy alone, where those of the trials are too short for a counter.

        Without levers it is the plain side only.

        Raises:
            CandidateFailed: The script broke under the levers.
        """
        bench = self._bench
        counters = [series.counter for series in self._meter.log().series if series.counter.device in self._devices()]
        if not counters:
            return
        needed_s = MIN_UPDATES * max(max(counter.resolution_s for counter in counters), self._meter.every_s)
        if bench.size.num_steps * bench.step_guess_s >= needed_s or ROOM * needed_s > LONGEST_S:
            return
        former = bench.size
        bench.size = replace(former, num_steps=math.ceil(ROOM * needed_s / bench.step_guess_s))
        try:
            bench.window({}, purpose="plain energy", skip=former.loader_skip_steps)
            if levers:
                bench.window(levers, purpose="energy", skip=former.loader_skip_steps)
        except Inconclusive:  # the script is too short for it
            return
        finally:
            bench.size = former

    def summary(self, conduct: Conduct) -> EnergySummary:
        """What was learned about energy."""
        log = self._meter.log()
        if not log.series:
            return EnergySummary(missing=log.missing, baseline=Energy(why_not="no energy counter could be read"))
        final = conduct.final
        plain, tuned = self._sides.get(final.label if final is not None else "", (None, None))
        facts = self._bench.facts
        total = self._meter.joules(facts.device if facts is not None else None)
        return EnergySummary(
            counters=log.counters,
            missing=log.missing,
            noted_every_s=log.noted_every_s,
            baseline=plain or self._per_step(plain=True),
            tuned=tuned,
            measuring_joules=total.joules,
        )
