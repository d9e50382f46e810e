"""Where did each step's time go? A closed account: the phases sum to the wall time of the step.

In: the `phases` windows of a trace. Out: an `Anatomy`, with `unattributed` as a row of its own, and with phases that
could not be seen named as such instead of being 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flatout.errors import Inconclusive
from flatout.judge import stats
from flatout.records.trace import OUTSIDE, PHASES, Window

AS_IT_COMES = ("other", "garbage")
"""Phases that are seen wherever they come up: where none is written down there was none."""

MOST_DRIFT = 2.0
"""A machine whose cores nobody else uses becomes so many times as slow or fast between two measurements at the most."""

RECORDING_S = 70e-6
"""What timing the phases of a step makes it longer by: 3.4 to 7.8 % of 0.9 ms in runs of `benchmarks/overhead.py`."""

MARKING_S = 100e-6
"""The same for the marks on a device's clock, some 20 events of up to 5 µs; not yet measured on one."""

ROUNDING = 1e-12
"""A remainder below this share of the whole comes from adding floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The mean step, taken apart.

    Attributes:
        step_s: Mean wall seconds of a training step (without `outside_s`).
        phases_s: Seconds by phase within the step, largest first, `unattributed` last; they and nothing else sum to
            `step_s`. `unattributed` is below 0 where something was counted twice. By the clock of the device that
            trains, where it has a queue: what lies between two of its marks, waiting included.
        spread_fraction: By phase, half the interquartile range of its share of the step between windows; NaN with one.
            Of what lies between steps, the standard error of its share of all the time that so few of them leave.
        outside_s: Seconds per step of what lies between steps (evaluation, checkpoints).
        not_observed: Phases that could not be seen in this run; none of them is known to be 0.
        host_s: Seconds by phase where Python was meanwhile, where `phases_s` are a device's; else empty.
        not_trained_s: Of `forward`, seconds in models that no optimizer trains, by name.
        num_steps: Steps behind the means.
        num_windows: Windows behind the spread.
    """

    step_s: float
    phases_s: Mapping[str, float]
    spread_fraction: Mapping[str, float]
    outside_s: Mapping[str, float]
    not_observed: tuple[str, ...]
    num_steps: int
    num_windows: int
    host_s: Mapping[str, float] = field(default_factory=dict)
    not_trained_s: Mapping[str, float] = field(default_factory=dict)

    def share(self, phase: str) -> float | None:
        """The phase's share of the step, or None where it was not observed."""
        seconds = self.phases_s.get(phase)
        return None if seconds is None or not self.step_s > 0 else seconds / self.step_s

    @property
    def all_s(self) -> float:
        """Seconds of a step and of its part of what lies between steps."""
        return self.step_s + math.fsum(self.outside_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The same step, timed in plain windows and in windows of another kind: does one contradict the other?

    Attributes:
        plain_s: Seconds of a step, of each plain window.
        other_s: The same of the others.
        cost_s: What looking may make a step of theirs longer by, seconds; infinite where that is not known.
        in_turn: Whether they are pairs, measured next to each other.
        noise: The standard deviation of log ratios between equal sides, as it was seen before.
    """

    plain_s: tuple[float, ...]
    other_s: tuple[float, ...]
    cost_s: float = RECORDING_S
    in_turn: bool = False
    noise: float = 0.0

    def seems_to_differ(self, times: float) -> bool:
        """Whether the one takes more than so many times as long as the other in the median, however sure that is."""
        if not (self.plain_s and self.other_s):
            return False
        ratio = stats.summarize(self.plain_s).median / stats.summarize(self.other_s).median
        return self._outside(ratio, ratio, times)

    def contradicts(self, times: float) -> bool:
        """Whether the one surely takes more than so many times as long as the other, and `MOST_DRIFT` if not in turn.

        Of pairs that is the 99 % interval; of others every window must: of 4 beside 8, one case in 250 by luck.
        """
        if min(len(self.plain_s), len(self.other_s)) < stats.MIN_PAIRS:
            return False
        if self.in_turn:
            found = stats.compare(self.plain_s, self.other_s, noise=self.noise)
            return self._outside(found.low99, found.high99, times)
        low, high = min(self.plain_s) / max(self.other_s), max(self.plain_s) / min(self.other_s)
        return self._outside(low, high, max(times, MOST_DRIFT))

    def is_open(self, times: float) -> bool:
        """Whether it does not close: one contradicts the other, or the medians lie `MOST_DRIFT` and both spreads apart.

        So far apart they may be by chance where steps are of two lengths, or too few could be measured in turn; but
        nobody has seen them agree.
        """
        sides = [stats.summarize(one).spread_fraction for one in (self.plain_s, self.other_s) if one]
        return self.contradicts(times) or self.seems_to_differ(MOST_DRIFT * math.prod(1 + one for one in sides))

    def _outside(self, low: float, high: float, times: float) -> bool:
        return low > times or high < 1 / (times + self.cost_s / stats.summarize(self.plain_s).median)


def dissect(windows: Sequence[Window], beside: Sequence[Window] = ()) -> Anatomy:
    """The anatomy of the steps in those windows whose phases were observed.

    A phase that some windows saw and others did not took no time in those others: it can be seen in this run. What
    lies between steps comes so seldom that it is counted in all windows `beside` them, where there are any.

    Raises:
        Inconclusive: No window with phases and at least one step that took time.
    """
    seen = [w for w in windows if w.observe == "phases" and w.num_steps]
    training_s = math.fsum(map(_training_s, seen))
    if not training_s > 0:
        raise Inconclusive(
            "no step was taken apart",
            cause="the script ended before a window with phases was complete",
            hint="give the script more steps, e.g. more epochs",
        )
    num_steps = sum(w.num_steps for w in seen)
    inside = sorted({name for w in seen for name in w.account if name not in (*OUTSIDE, "unattributed")})
    totals = {name: math.fsum(_total(w, name) for w in seen) for name in inside}
    rest_s = training_s - math.fsum(totals.values())
    totals["unattributed"] = 0.0 if abs(rest_s) < ROUNDING * training_s else rest_s
    outside, errors = _between(beside or seen)
    names = sorted({name for w in seen for name in w.not_trained_s})
    ordered = sorted(totals, key=lambda name: (name == "unattributed", -totals[name]))
    return Anatomy(
        step_s=training_s / num_steps,
        phases_s={name: totals[name] / num_steps for name in ordered},
        spread_fraction={**{name: _spread(seen, name) for name in (*inside, "unattributed")}, **errors},
        outside_s=outside,
        not_observed=tuple(name for name in PHASES if name not in totals and name not in (*OUTSIDE, *AS_IT_COMES)),
        num_steps=num_steps,
        num_windows=len(seen),
        host_s=_of_host(seen, num_steps),
        not_trained_s={name: math.fsum(w.not_trained_s.get(name, 0.0) for w in seen) / num_steps for name in names},
    )


def _training_s(window: Window) -> float:
    """Seconds of its steps; of a device the sum of its phases, for windows were once as long as Python's part."""
    if not window.device_phases:
        return window.training_s
    return math.fsum(math.fsum(spent) for phase, spent in window.account.items() if phase not in OUTSIDE)


def _total(window: Window, name: str) -> float:
    if name == "unattributed":
        return _training_s(window) - math.fsum(
            math.fsum(spent) for phase, spent in window.account.items() if phase not in (*OUTSIDE, "unattributed")
        )
    return math.fsum(window.account.get(name, ()))


def _spread(windows: Sequence[Window], name: str) -> float:
    shares = [_total(w, name) / _training_s(w) for w in windows if _training_s(w) > 0]
    if len(shares) < 2:
        return float("nan")
    ordered = sorted(shares)
    return (stats.quantile(ordered, 0.75) - stats.quantile(ordered, 0.25)) / 2


def _between(windows: Sequence[Window]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per step of each that lies between steps, and the standard error of its share of all the time."""
    num_steps, all_s = sum(w.num_steps for w in windows), math.fsum(math.fsum(w.step_s) for w in windows)
    seconds, errors = {}, {}
    for name in OUTSIDE:
        seen_s = [spent_s for w in windows for spent_s in w.account.get(name, ()) if spent_s > 0]
        if seen_s:
            share = math.fsum(seen_s) / all_s
            seconds[name] = math.fsum(seen_s) / num_steps
            errors[name] = share * (1 - share) / math.sqrt(len(seen_s))
    return seconds, errors


def _of_host(windows: Sequence[Window], num_steps: int) -> dict[str, float]:
    seen = [w for w in windows if w.device_phases]
    names = sorted({name for w in seen for name in w.phases if name not in OUTSIDE})
    return {name: math.fsum(math.fsum(w.phases.get(name, ())) for w in seen) / num_steps for name in names}
