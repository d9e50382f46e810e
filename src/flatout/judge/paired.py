"""The paired experiment: what is measured next, and when is it enough? The one way in which anything is compared.

In: readings of a baseline and of a candidate, as they come. Out: the next `Turn`, and `Pairs` for `stats.compare`.
Two readings make a pair: one after the other, in an order drawn by lot; one that something disturbed is left out.
Nothing here measures: windows of a process, processes, whole starts and the user's own run are read by whoever is asked
(`trials/windows.py`, `trials/starts.py`, `trials/learn.py`, `run/controller.py`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flatout.judge import stats
from flatout.judge.sequential import Looks
from flatout.judge.stats import Comparison
from flatout.records.plan import Trial
from flatout.records.trace import FOREIGN_LIMIT, Levers, Window

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


@dataclass(slots=True)
class Pair:
    """Two windows one after the other, in an order drawn by lot; a whole start counts as one."""

    order: list[bool]
    """Which side goes next: True for the candidate."""
    readings: dict[bool, Window | None] = field(default_factory=dict)

    @classmethod
    def drawn(cls, lots: random.Random) -> Pair:
        """One whose order the lot has decided: unrelated to what the machine does, which is all that is asked of it."""
        return cls(order=[True, False] if lots.random() < 0.5 else [False, True])

    def keep(self, reading: Window | None) -> None:
        """The reading of the side whose turn it was; None where there was none."""
        self.readings[self.order.pop(0)] = reading

    @property
    def candidate_first(self) -> bool:
        """Whether the candidate went first."""
        return next(iter(self.readings), True)

    @property
    def step_s(self) -> tuple[float, float] | None:
        """Seconds of a step of the baseline and of the candidate; None where a reading is missing."""
        baseline, candidate = self.readings.get(False), self.readings.get(True)
        if baseline is None or candidate is None:
            return None
        both = baseline.compared_s, candidate.compared_s
        return both if min(both) > 0 else None

    @property
    def is_busy(self) -> bool:
        """Whether others used the CPU beside one of them."""
        return any(is_busy(one) for one in self.readings.values() if one is not None)

    @property
    def compiled(self) -> bool:
        """Whether something was compiled beside one of them."""
        return any(one.recompilations > 0 for one in self.readings.values() if one is not None)

    @property
    def is_uneven(self) -> bool:
        """Whether one side paid for what comes between two epochs and the other did not, where epochs are long.

        Or whether one of both had smaller batches.
        """
        both = [one for one in self.readings.values() if one is not None]
        if any(one.is_short for one in both):
            return True
        return len(both) == 2 and both[0].new_epochs != both[1].new_epochs and max(one.new_epochs for one in both) == 1


def is_busy(reading: Window) -> bool:
    """Whether others used so much of the CPU or the GPU that nothing is concluded from it."""
    return reading.taken_fraction > FOREIGN_LIMIT


def is_calm(reading: Window) -> bool:
    """Whether neither other processes nor a compilation nor a smaller batch disturbed it."""
    return not is_busy(reading) and not reading.recompilations and not reading.is_short


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
        share: What the look that ended it may spend of the errors, see `sequential.Looks`.
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

    def note(self, pair: Pair) -> None:
        """Take a pair into account, or leave it out where something disturbed it."""
        both = pair.step_s
        if both is None or pair.is_busy or pair.compiled or pair.is_uneven:
            self.num_discarded += 1
            self.num_busy += pair.is_busy
            return
        self.baseline_s.append(both[0])
        self.candidate_s.append(both[1])
        self.candidate_first.append(pair.candidate_first)
        peaks = {side: one.peak_memory_bytes for side, one in pair.readings.items() if one is not None}
        self.baseline_peak_memory_bytes = _highest(self.baseline_peak_memory_bytes, peaks[False])
        self.peak_memory_bytes = _highest(self.peak_memory_bytes, peaks[True])

    def saw(self, evidence: Mapping[str, str], missing: Mapping[str, str]) -> None:
        """Keep what has shown its effect under the candidate, and what has not yet."""
        self.evidence.update(evidence)
        self.missing = {name: why for name, why in {**self.missing, **missing}.items() if name not in self.evidence}

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
        deadline_s: `time.perf_counter` after which no further pair is begun.
        min_pairs: Pairs that are measured even so, and at most twice as many that are discarded.
        patience_s: So many seconds after the deadline no further pair is begun even so, but for a first one.
        most: Pairs that are begun at most; 0 for three times as many as are wanted.
        close: An interval that reaches no further to either side is known, where `enough` asks for that.
        to_beat: The ratio below which the candidate is worth nothing, however well it does beside plain.
    """

    looks: Looks
    enough: Enough
    deadline_s: float = math.inf
    min_pairs: int = 1
    patience_s: float = math.inf
    most: int = 0
    close: float = CLOSE_ENOUGH
    to_beat: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be read next.

    Attributes:
        candidate: Whether it is the candidate's turn, else the baseline's.
        stretch: A window is to be so many times as long as usual.
        opens: Whether a pair begins with it.
    """

    candidate: bool
    stretch: float
    opens: bool


Turns = Generator[Turn, Window | None, None]


def turns(pairs: Pairs, extent: Extent, lots: random.Random) -> Turns:
    """Ask for one reading after the other until there are enough, it is hopeless, or the time is over.

    Args:
        pairs: Is filled with what comes.
        extent: How much to measure.
        lots: Draws which side goes first.
    """
    num_begun, most = 0, extent.most or 3 * extent.looks.at[-1]
    while num_begun < most and not is_done(pairs, extent):
        num = len(pairs.baseline_s)
        enough = num >= extent.min_pairs or num_begun >= 2 * extent.min_pairs  # where others disturb, there may be none
        over_s = time.perf_counter() - extent.deadline_s
        if over_s > 0 and (enough or (num_begun and over_s > extent.patience_s)):
            left_out = f", {pairs.num_discarded} more were left out as disturbed" if pairs.num_discarded else ""
            pairs.given_up = f"the time was over after {num} pair{'s' * (num != 1)}{left_out}"
            return
        pair = Pair.drawn(lots)
        stretch = lots.uniform(1 - STRETCH, 1 + STRETCH)
        while pair.order:
            pair.keep((yield Turn(pair.order[0], stretch, opens=not pair.readings)))
        pairs.note(pair)
        num_begun += 1


def after(asked: Turns, reading: Window | None) -> Turn | None:
    """The turn that follows a reading; None where it was the last."""
    try:
        return asked.send(reading)
    except StopIteration:
        return None


def is_done(pairs: Pairs, extent: Extent) -> bool:
    """Look, where a look is due; what it may spend of the errors goes with what has been measured."""
    num = len(pairs.baseline_s)
    if extent.enough == "known" and is_hopeless(pairs, extent.to_beat):
        beside = f", where {extent.to_beat:.2f} was to be beaten" if extent.to_beat > 1 else ""
        pairs.given_up = f"2 pairs, both below {HOPELESS * extent.to_beat:.2f}{beside}: not pursued"
        return True
    pairs.share = extent.looks.left(num)
    if num >= extent.looks.at[-1]:
        return True
    if num not in extent.looks.at or num == pairs.looked_at:
        return False
    pairs.looked_at, pairs.share = num, extent.looks.share(num)
    found = pairs.compare()
    if extent.enough == "known" and is_known(found, extent.to_beat, extent.close):
        return True
    if extent.enough == "clear" and found.verdict != "inconclusive":
        return True
    pairs.share = extent.looks.left(num)
    return False


def is_hopeless(pairs: Pairs, to_beat: float) -> bool:
    """Whether the first two pairs leave no hope."""
    ratios = pairs.ratios
    return len(ratios) == 2 and max(ratios) < HOPELESS * to_beat


def is_known(found: Comparison, to_beat: float, close: float) -> bool:
    """Whether it is known what a candidate is worth that may be measured again: surely not enough, or closely."""
    return found.high < to_beat or (found.high - found.low) / 2 < close


def trial_of(pairs: Pairs, levers: Levers, class_: str, took_s: float) -> Trial:
    """What measuring a candidate gave; of too few pairs the median and the range."""
    compared = pairs.compare()
    ratio, low, high = pairs.ratio()
    reason = compared.reason if compared.verdict == "inconclusive" else ""
    if not math.isfinite(compared.ratio):
        reason = pairs.given_up or reason
    if pairs.num_busy and ratio is None:
        reason = "other processes used the CPU in every window"
    return Trial(
        levers=levers, outcome=compared.verdict, reason=reason, ratio=ratio, ratio_low=low, ratio_high=high,
        num_pairs=len(pairs.baseline_s), num_discarded=pairs.num_discarded, class_=class_, took_s=took_s,
        engage_s=pairs.engage_s, peak_memory_bytes=pairs.peak_memory_bytes,
        baseline_peak_memory_bytes=pairs.baseline_peak_memory_bytes, baseline_step_s=tuple(pairs.baseline_s),
        candidate_step_s=tuple(pairs.candidate_s), candidate_first=tuple(pairs.candidate_first), share=pairs.share,
        noise=pairs.noise, evidence=pairs.evidence,
    )  # fmt: skip


def pairs_of(trial: Trial) -> Pairs:
    """The pairs that a trial was made from, to go on with."""
    return Pairs(
        baseline_s=list(trial.baseline_step_s), candidate_s=list(trial.candidate_step_s),
        candidate_first=list(trial.candidate_first), noise=trial.noise, evidence=dict(trial.evidence),
    )  # fmt: skip


def _highest(former: int | None, found: int | None) -> int | None:
    return found if former is None else former if found is None else max(former, found)
