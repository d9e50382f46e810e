"""How much energy went into a stretch of time, as far as counters that were noted now and then can tell?

In: a log of cumulative counters (RAPL, NVML) and the instants at which something began and ended, both on one clock.
Out: joules, or the reason why nothing can be said. Pure
arithmetic: the counters are read elsewhere (`machine/energy_counters.py`), so that a log is judged anywhere.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flatout.errors import RecordError
from flatout.records.as_json import from_json, to_json

FORMAT = 1

MIN_UPDATES = 10
"""A stretch in which a counter was seen to change less often is too short: one update is over a tenth of it."""

MOST_WATTS = 10_000.0
"""A counter behind whose beginning anew more power would stand has gone back: it was reset, or read wrongly."""

Device = Literal["cpu", "memory", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """One counter of the machine, which only grows.

    Attributes:
        name: For example `package-0`, `dram-0`, `gpu-0`.
        device: What it counts.
        source: Who counts and through what it is read, in a few words.
        resolution_s: How often it changes, as its maker says.
        resolution_joules: Its smallest step.
        range_joules: It begins anew behind this value; None where it does not.
    """

    name: str
    device: Device
    source: str
    resolution_s: float
    resolution_joules: float
    range_joules: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one counter showed.

    Attributes:
        counter: Which one.
        at_s: When it was read, on the clock that all logs of a machine share; growing.
        joules: What it showed then.
    """

    counter: Counter
    at_s: tuple[float, ...] = ()
    joules: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """All counters of one measurement.

    Attributes:
        series: One for each counter that could be read.
        missing: What could not be read, why, and what to do about it.
        noted_every_s: How often the counters were to be read.
        format: Version of this record.
    """

    series: tuple[Series, ...] = ()
    missing: tuple[str, ...] = ()
    noted_every_s: float = math.nan
    format: int = FORMAT

    @property
    def counters(self) -> tuple[Counter, ...]:
        """The counters that were read."""
        return tuple(one.counter for one in self.series)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time on the log's clock, and how many steps were made in it."""

    start_s: float
    end_s: float
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What was used in some stretch of time, or for one step of it.

    Attributes:
        joules: The sum over the counters; None where one of them cannot tell.
        parts: The same by counter, of those that can tell.
        num_windows: Stretches behind it.
        why_not: Why there is no sum, or empty.
    """

    joules: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    num_windows: int = 0
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySummary:
    """What one `tune` or `why` learned about energy.

    Attributes:
        counters: Those that were read.
        missing: What could not be read, and why.
        noted_every_s: How often they were read.
        baseline: One plain step.
        tuned: One step under the best candidate; None where none was measured again.
        measuring_joules: What the whole measurement used.
    """

    counters: tuple[Counter, ...] = ()
    missing: tuple[str, ...] = ()
    noted_every_s: float = math.nan
    baseline: Energy = field(default_factory=Energy)
    tuned: Energy | None = None
    measuring_joules: float | None = None


def unwrapped(joules: Sequence[float], range_joules: float | None) -> list[float]:
    """A counter's values as if it had never begun anew.

    Raises:
        ValueError: It went back, and is none that does.

    Source: `Documentation/power/powercap/powercap.rst`, Linux: `energy_uj` wraps at `max_energy_range_uj`.

    >>> unwrapped([90.0, 99.0, 5.0], 100.0)
    [90.0, 99.0, 105.0]
    """
    found: list[float] = []
    turns = 0.0
    for number, value in enumerate(joules):
        if number and value < joules[number - 1]:
            if range_joules is None:
                raise ValueError("the counter went back")
            turns += range_joules
        found.append(value + turns)
    return found


class Curve:
    """The energy of one counter over time: what it surely was at an instant, and what it most likely was.

    A counter shows what was used up to its last update, so a reading at `r` shows the energy of some instant within one
    update before `r`. In between the power is taken to be constant from one change to the next.

    Args:
        series: What the counter showed.

    Raises:
        ValueError: It went back.
    """

    def __init__(self, series: Series) -> None:
        self.counter = series.counter
        self._at_s = series.at_s
        self._joules = unwrapped(series.joules, series.counter.range_joules)
        self._refuse_resets(series)
        last = len(self._at_s) - 1
        changed = [
            n for n in range(last + 1) if n in (0, last) or self._joules[n] != self._joules[n - 1]
        ]  # a reading without a change tells when none came, not where the energy stood
        self._knots_s = [self._at_s[n] for n in changed]
        self._knots_joules = [self._joules[n] for n in changed]

    def _refuse_resets(self, series: Series) -> None:
        for n in range(1, len(series.joules)):
            took_s = max(series.at_s[n] - series.at_s[n - 1], series.counter.resolution_s)
            gained = self._joules[n] - self._joules[n - 1]
            if series.joules[n] < series.joules[n - 1] and not 0 <= gained <= MOST_WATTS * took_s:
                raise ValueError("the counter went back")

    def covers(self, start_s: float, end_s: float) -> bool:
        """Whether it was read before the one instant and after the other."""
        return bool(self._at_s) and self._at_s[0] <= start_s <= end_s <= self._at_s[-1]

    def num_updates(self, start_s: float, end_s: float) -> int:
        """How often it was seen to change between two instants."""
        return bisect_right(self._knots_s, end_s) - bisect_left(self._knots_s, start_s)

    def at(self, instant_s: float) -> float:
        """The energy at an instant that it covers, by linear interpolation between changes."""
        above = bisect_left(self._knots_s, instant_s)
        if above >= len(self._knots_s) or self._knots_s[above] == instant_s:
            return self._knots_joules[min(above, len(self._knots_s) - 1)]
        begun_s, ended_s = self._knots_s[above - 1 : above + 1]
        begun, ended = self._knots_joules[above - 1 : above + 1]
        return begun + (ended - begun) * (instant_s - begun_s) / (ended_s - begun_s)


class Curves:
    """All counters of a log that count for something that runs on some devices.

    Args:
        log: What was noted.
        devices: Which counters belong to the sum; None for all.
    """

    def __init__(self, log: Log, devices: Collection[Device] | None = None) -> None:
        self._curves: list[Curve] = []
        self._why_not = "" if log.series else "no energy counter could be read"
        for series in log.series:
            if devices is not None and series.counter.device not in devices:
                continue
            try:
                self._curves.append(Curve(series))
            except ValueError as problem:
                self._why_not = f"{series.counter.name}: {problem}"
        if not self._curves:
            self._why_not = self._why_not or "no counter counts what this runs on"

    def between(self, start_s: float, end_s: float, *, min_updates: int = MIN_UPDATES) -> Energy:
        """What was used between two instants.

        Args:
            start_s: The one, on the log's clock.
            end_s: The other.
            min_updates: Changes that each counter must have been seen to make.
        """
        joules = 0.0
        parts: dict[str, float] = {}
        why_not = self._why_not
        for curve in self._curves:
            if not curve.covers(start_s, end_s):
                why_not = why_not or f"{curve.counter.name} was not read before and after"
            elif (num := curve.num_updates(start_s, end_s)) < min_updates:
                why_not = why_not or _too_short(curve.counter, end_s - start_s, num)
            elif end_s - start_s >= curve.counter.resolution_s and curve.at(end_s) == curve.at(start_s):
                why_not = why_not or f"{curve.counter.name} stood still"
            else:
                parts[curve.counter.name] = used = curve.at(end_s) - curve.at(start_s)
                joules += used
        if why_not:
            return Energy(parts=parts, why_not=why_not)
        return Energy(joules=joules, parts=parts, num_windows=1)

    def per_step(self, spans: Sequence[Span]) -> Energy:
        """The energy of one step: the mean over the spans that can tell."""
        found = [(span, self.between(span.start_s, span.end_s)) for span in spans]
        known = [(span, energy) for span, energy in found if energy.joules is not None and span.num_steps]
        if not known:
            why_not = next((energy.why_not for _, energy in found if energy.why_not), "no window was measured")
            return Energy(why_not=why_not)
        num_steps = sum(span.num_steps for span, _ in known)
        names = known[0][1].parts
        return Energy(
            joules=math.fsum(e.joules or 0.0 for _, e in known) / num_steps,
            parts={name: math.fsum(e.parts[name] for _, e in known) / num_steps for name in names},
            num_windows=len(known),
        )


def _too_short(counter: Counter, took_s: float, num: int) -> str:
    changes = f"{counter.name} was seen to change {num} time{'s' * (num != 1)}"
    return f"{changes} in {took_s:.2g} s, which tells too little: {MIN_UPDATES} changes are needed"


def save(log: Log, path: Path) -> None:
    """Write a log as JSON.

    Raises:
        OSError: The folder cannot be written.
    """
    path.write_text(json.dumps(to_json(log), allow_nan=False), encoding="utf-8")


def load(path: Path) -> Log:
    """The log that `save` wrote.

    Raises:
        RecordError: It is missing or torn.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise RecordError(
            f"no energy log in `{path}`", cause=str(problem), hint="measure again, or restore the file"
        ) from None
    return from_json(Log, value, where=f"`{path}`")
