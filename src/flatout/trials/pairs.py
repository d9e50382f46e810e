"""How fast is a candidate beside the baseline? Paired windows in the order A B B A, disturbed ones discarded.

In: a bench, levers, how many pairs. Out: `Pairs` with the step times of both sides, ready for `stats.compare`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flatout import stats
from flatout.stats import Comparison
from flatout.trace import Levers, Window
from flatout.trials.bench import Bench

FOREIGN_LIMIT = 0.10
"""A window in which others used more than this share of the cores is discarded."""

HOPELESS = 0.93
"""After two pairs that are both below this, a candidate is not measured further."""

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

    def compare(self) -> Comparison:
        """The comparison of the pairs so far."""
        return stats.compare(self.baseline_s, self.candidate_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much to measure.

    Attributes:
        num_pairs: Pairs wanted.
        purpose: Noted with the windows.
        deadline_s: `time.perf_counter` after which no further pair is begun.
        min_pairs: Pairs that are measured even so, and at most twice as many that are discarded.
        stop_early: Whether to stop as soon as it is known what the candidate is worth: hopeless after two pairs,
            surely slower, or known closely enough. What is chosen so is measured again.
        until_clear: Go on to this many pairs where the verdict is inconclusive after `num_pairs`. There is no look in
            between: each look is another chance to be wrong (looking after every pair from 10 to 16 raises false
            alarms from 1 % to 3.3 %, simulated).
    """

    num_pairs: int
    purpose: str
    deadline_s: float
    min_pairs: int = 1
    stop_early: bool = True
    until_clear: int = 0


def measure(bench: Bench, levers: Levers, extent: Extent, baseline: Levers | None = None) -> Pairs:
    """Measure pairs until there are enough, it is hopeless, or the time is over.

    Raises:
        CandidateFailed: The script broke under the levers.
    """
    pairs = Pairs()
    plain: Levers = baseline or {}
    begun_s = time.perf_counter()
    number = 0
    while not _done(pairs, extent):
        num = len(pairs.baseline_s)
        enough = num >= extent.min_pairs or number >= 2 * extent.min_pairs  # where others disturb, there may be none
        if enough and time.perf_counter() > extent.deadline_s:
            pairs.given_up = f"the time was over after {num} pair{'s' * (num != 1)}"
            break
        order = (plain, levers) if number % 2 == 0 else (levers, plain)
        windows = [
            _window(bench, pairs, side, other, extent.purpose) for side, other in zip(order, order[::-1], strict=True)
        ]
        first, second = windows if number % 2 == 0 else windows[::-1]
        if number == 0:
            pairs.engage_s = max(time.perf_counter() - begun_s - sum(sum(w.step_s) for w in windows), 0.0)
        note(pairs, first, second)
        bench.resize_after(first)
        number += 1
        if number >= 3 * max(extent.num_pairs, extent.until_clear):
            break
    return pairs


def _done(pairs: Pairs, extent: Extent) -> bool:
    num = len(pairs.baseline_s)
    if extent.stop_early and num < extent.num_pairs:
        return known_early(pairs)
    if num < extent.num_pairs:
        return False
    if num >= extent.until_clear:
        return True
    return num == extent.num_pairs and pairs.compare().verdict != "inconclusive"


def known_early(pairs: Pairs) -> bool:
    """Whether it is known already what a candidate is worth that may be measured again."""
    num = len(pairs.baseline_s)
    if num == 2 and max(a / b for a, b in zip(pairs.baseline_s, pairs.candidate_s, strict=True)) < HOPELESS:
        pairs.given_up = f"2 pairs, both below {HOPELESS}: not pursued"
        return True
    if num < stats.MIN_PAIRS:
        return False
    found = pairs.compare()
    return found.high < 1.0 or (found.high - found.low) / 2 < CLOSE_ENOUGH


def _window(bench: Bench, pairs: Pairs, levers: Levers, other: Levers, purpose: str) -> Window:
    changes_loader = any(
        bench.levers[name].toggles == "epoch"
        for name in set(levers) ^ set(other) | {n for n in levers if other.get(n) != levers[n]}
        if name in bench.levers
    )
    skip = bench.size.loader_skip_steps if changes_loader else bench.size.skip_steps
    window = bench.window(levers, purpose=purpose if levers else "baseline", skip=skip)
    if levers:
        pairs.evidence.update(bench.last_evidence)
        pairs.missing.update(bench.last_missing)
        pairs.missing = {name: why for name, why in pairs.missing.items() if name not in pairs.evidence}
    return window


def note(pairs: Pairs, first: Window, second: Window) -> None:
    """Take a baseline window and the candidate's beside it into account, or discard both where one was disturbed."""
    busy = any((w.foreign_fraction or 0.0) > FOREIGN_LIMIT for w in (first, second))
    if busy or first.recompilations or second.recompilations or unequal_epochs(first, second):
        pairs.num_discarded += 1
        pairs.num_busy += busy
        return
    pairs.baseline_s.append(first.training_step_s)
    pairs.candidate_s.append(second.training_step_s)
    pairs.baseline_peak_memory_bytes = _highest(pairs.baseline_peak_memory_bytes, first.peak_memory_bytes)
    pairs.peak_memory_bytes = _highest(pairs.peak_memory_bytes, second.peak_memory_bytes)


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
