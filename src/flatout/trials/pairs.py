"""How fast is a candidate beside the baseline? Paired windows in an order drawn by lot, disturbed ones left out.

In: a bench, levers, how many pairs. Out: `Pairs` with the step times of both sides, ready for `stats.compare`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from flatout.judge import stats
from flatout.judge.looks import Looks
from flatout.judge.stats import Comparison
from flatout.records.trace import FOREIGN_LIMIT, Levers, Window
from flatout.trials.bench import Bench
from flatout.trials.ends import CandidateFailed
from flatout.trials.window_size import Size

STRETCH = 0.25
"""Each pair's windows are longer or shorter by up to this share, drawn by lot: no rhythm of the machine stays in step.
Simulated with a rhythm of two windows: a gain of 5 % is found in 99 of 100 cases instead of 89."""

HOPELESS = 0.93
"""After two pairs that are both below this share of what is to be beaten, a candidate is not measured further."""

SCREENING = Looks.alike(stats.MIN_PAIRS, 9)
"""After 4 pairs a candidate may be known closely enough; 9 are the fewest that have a 99 % interval by ranks when half
of the error is spent already."""

CLOSE_ENOUGH = 0.02
"""A candidate whose interval reaches no further than this to either side is known closely enough to be chosen from."""


@dataclass(slots=True, kw_only=True)
class Pairs:
    """What was measured so far.

    Attributes:
        baseline_s: Step time of each baseline window.
        candidate_s: Step time of the candidate window beside it.
        num_discarded: Pairs left out.
        num_busy: Those of them left out because others used the CPU.
        given_up: Why it was stopped early, or empty.
        peak_memory_bytes: Highest memory of the candidate's windows.
        baseline_peak_memory_bytes: Highest memory of the baseline's windows.
        engage_s: What engaging cost the first time.
        evidence: Lever to proof.
        missing: Lever to why there is no proof.
        candidate_first: For each pair whether the lot had the candidate go first.
        share: What the look that ended it may spend of the errors, see `looks.Looks`.
        noise: Standard deviation of log ratios between equal sides, as seen before.
        looked_at: After how many pairs it was looked at last.
    """

    baseline_s: list[float] = field(default_factory=list)
    candidate_s: list[float] = field(default_factory=list)
    num_discarded: int = 0
    num_busy: int = 0
    given_up: str = ""
    peak_memory_bytes: int | None = None
    baseline_peak_memory_bytes: int | None = None
    engage_s: float = 0.0
    evidence: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    candidate_first: list[bool] = field(default_factory=list)
    share: float = 1.0
    noise: float = 0.0
    looked_at: int = 0

    @property
    def ratios(self) -> list[float]:
        """How many times as fast the candidate was, pair by pair."""
        return [a / b for a, b in zip(self.baseline_s, self.candidate_s, strict=True)]

    def compare(self) -> Comparison:
        """The comparison of the pairs so far."""
        return stats.compare(self.baseline_s, self.candidate_s, share=self.share, noise=self.noise)

    def ratio(self) -> tuple[float | None, float | None, float | None]:
        """How many times as fast the candidate was, and its interval; of too few pairs the median and the range."""
        if math.isfinite((compared := self.compare()).ratio):
            return compared.ratio, compared.low, compared.high
        if not (ratios := self.ratios):
            return None, None, None
        return stats.summarize(ratios).median, min(ratios), max(ratios)


Enough = Literal["known", "clear", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much to measure.

    Attributes:
        looks: After how many pairs the comparison is looked at; the last says how many are wanted at most.
        enough: What ends it at a look. `known`: what the candidate is worth is known well enough to choose from (what
            is chosen is measured again), and it is given up where two pairs are hopeless. `clear`: the verdict is not
            inconclusive. `all`: nothing.
        purpose: Noted with the windows.
        deadline_s: `time.perf_counter` after which no further pair is begun.
        min_pairs: Pairs that are measured even so, and at most twice as many that are discarded.
        to_beat: The ratio below which the candidate is worth nothing, however well it does beside plain.
    """

    looks: Looks
    enough: Enough
    purpose: str
    deadline_s: float
    min_pairs: int = 1
    to_beat: float = 1.0


def measure(bench: Bench, levers: Levers, extent: Extent, baseline: Levers | None = None) -> Pairs:
    """Measure pairs until there are enough, it is hopeless, or the time is over.

    Raises:
        CandidateFailed: The script broke under the levers.
    """
    pairs = Pairs(noise=bench.noise)
    bench.unreleased = ""
    plain: Levers = baseline or {}
    begun_s = time.perf_counter()
    number = 0
    while not is_done(pairs, extent):
        num = len(pairs.baseline_s)
        enough = num >= extent.min_pairs or number >= 2 * extent.min_pairs  # where others disturb, there may be none
        if enough and time.perf_counter() > extent.deadline_s:
            left_out = f", {pairs.num_discarded} more were left out as disturbed" if pairs.num_discarded else ""
            pairs.given_up = f"the time was over after {num} pair{'s' * (num != 1)}{left_out}"
            break
        candidate_first = bench.lots.random() < 0.5
        plan = [(plain, levers), (levers, plain)]
        sides = plan[::-1] if candidate_first else plan
        size = bench.size.stretched(bench.lots.uniform(1 - STRETCH, 1 + STRETCH))
        windows = [_window(bench, pairs, side, other, extent.purpose, size) for side, other in sides]
        if levers and bench.unreleased:
            raise CandidateFailed(bench.unreleased)
        first, second = windows[::-1] if candidate_first else windows
        if number == 0:
            pairs.engage_s = max(time.perf_counter() - begun_s - sum(sum(w.step_s) for w in windows), 0.0)
        note(pairs, first, second, candidate_first=candidate_first)
        bench.resize_after(first)
        number += 1
        if number >= 3 * extent.looks.at[-1]:
            break
    return pairs


def is_done(pairs: Pairs, extent: Extent) -> bool:
    """Look, where a look is due; what it may spend of the errors goes with what has been measured."""
    num = len(pairs.baseline_s)
    if extent.enough == "known" and is_hopeless(pairs, extent.to_beat):
        pairs.given_up = not_pursued(extent.to_beat)
        return True
    pairs.share = extent.looks.left(num)
    if num >= extent.looks.at[-1]:
        return True
    if num not in extent.looks.at or num == pairs.looked_at:
        return False
    pairs.looked_at, pairs.share = num, extent.looks.share(num)
    found = pairs.compare()
    if extent.enough == "known" and is_known(found, extent.to_beat):
        return True
    if extent.enough == "clear" and found.verdict != "inconclusive":
        return True
    pairs.share = extent.looks.left(num)
    return False


def is_hopeless(pairs: Pairs, to_beat: float = 1.0) -> bool:
    """Whether the first two pairs leave no hope."""
    ratios = pairs.ratios
    return len(ratios) == 2 and max(ratios) < HOPELESS * to_beat


def not_pursued(to_beat: float = 1.0) -> str:
    """Why a hopeless candidate was measured no further."""
    beside = f", where {to_beat:.2f} was to be beaten" if to_beat > 1 else ""
    return f"2 pairs, both below {HOPELESS * to_beat:.2f}{beside}: not pursued"


def is_known(found: Comparison, to_beat: float = 1.0) -> bool:
    """Whether it is known what a candidate is worth that may be measured again: surely not enough, or to 2 %."""
    return found.high < to_beat or (found.high - found.low) / 2 < CLOSE_ENOUGH


def _window(bench: Bench, pairs: Pairs, levers: Levers, other: Levers, purpose: str, size: Size) -> Window:
    changes_loader = any(
        bench.levers[name].toggles == "epoch"
        for name in set(levers) ^ set(other) | {n for n in levers if other.get(n) != levers[n]}
        if name in bench.levers
    )
    skip = size.loader_skip_steps if changes_loader else size.skip_steps
    window = bench.window(levers, purpose=purpose if levers else "baseline", skip=skip, num_steps=size.num_steps)
    if levers:
        pairs.evidence.update(bench.last_evidence)
        pairs.missing.update(bench.last_missing)
        pairs.missing = {name: why for name, why in pairs.missing.items() if name not in pairs.evidence}
    return window


def note(pairs: Pairs, first: Window, second: Window, *, candidate_first: bool) -> None:
    """Take a baseline window and the candidate's beside it into account, or discard both where one was disturbed."""
    busy = any((w.foreign_fraction or 0.0) > FOREIGN_LIMIT for w in (first, second))
    if busy or first.recompilations or second.recompilations or unequal_epochs(first, second):
        pairs.num_discarded += 1
        pairs.num_busy += busy
        return
    pairs.baseline_s.append(first.training_step_s)
    pairs.candidate_s.append(second.training_step_s)
    pairs.candidate_first.append(candidate_first)
    pairs.baseline_peak_memory_bytes = _highest(pairs.baseline_peak_memory_bytes, first.peak_memory_bytes)
    pairs.peak_memory_bytes = _highest(pairs.peak_memory_bytes, second.peak_memory_bytes)


def calm(window: Window) -> bool:
    """Whether neither other processes nor a compilation disturbed the window."""
    return (window.foreign_fraction or 0.0) <= FOREIGN_LIMIT and not window.recompilations


def unequal_epochs(first: Window, second: Window) -> bool:
    """Whether one window paid for starting the loader over and the other did not, where epochs are long.

    Free data never starts over: that is part of what it is to show.
    """
    if "free_data" in second.levers:
        return False
    return first.new_epochs != second.new_epochs and max(first.new_epochs, second.new_epochs) == 1


def _highest(former: int | None, found: int | None) -> int | None:
    return found if former is None else former if found is None else max(former, found)


def wait_for_quiet(bench: Bench, deadline_s: float, show: Callable[[str], None]) -> bool:
    """Measure plain windows until others leave the machine alone; False when they do not before the deadline."""
    for _ in range(20):
        window = bench.window({}, purpose="baseline")
        if bench.resize_after(window):
            continue
        if (window.foreign_fraction or 0.0) <= FOREIGN_LIMIT:
            return True
        left_s = deadline_s - time.perf_counter()
        if left_s < 0:
            return False
        show(f"others use {100 * (window.foreign_fraction or 0.0):.0f} % of the CPU: waiting, at most {left_s:.0f} s")
        time.sleep(1.0)
    return False
