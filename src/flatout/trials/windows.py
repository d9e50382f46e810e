"""How is a candidate measured in windows: of one process that toggles its levers, or of processes by turns?

In: a bench, levers, how many pairs. Out: `Pairs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flatout.judge import paired
from flatout.judge.paired import Extent, Pairs, Turn
from flatout.records.trace import Levers, Window
from flatout.trials.bench import Bench
from flatout.trials.child_failures import CandidateFailed


def measure(bench: Bench, levers: Levers, extent: Extent, *, purpose: str) -> Pairs:
    """Measure pairs of windows of the running process.

    Args:
        bench: The script under measurement.
        levers: The candidate.
        extent: How much to measure.
        purpose: Noted with the windows under levers.

    Raises:
        CandidateFailed: The script broke under the levers.
    """
    pairs = Pairs(noise=bench.noise)
    bench.unreleased = ""
    begun_s: float | None = time.perf_counter()
    both: dict[bool, Window] = {}
    asked = paired.turns(pairs, extent, bench.lots)
    turn = next(asked, None)
    while turn is not None:
        both[turn.candidate] = window = _read(bench, pairs, turn, levers, purpose)
        if len(both) == 2:
            if levers and bench.unreleased:
                raise CandidateFailed(bench.unreleased)
            if begun_s is not None:  # the first pair pays for engaging
                pairs.engage_s = max(time.perf_counter() - begun_s - sum(sum(w.step_s) for w in both.values()), 0.0)
                begun_s = None
            bench.resize_after(both[False])
            both = {}
        turn = paired.after(asked, window)
    return pairs


def _read(bench: Bench, pairs: Pairs, turn: Turn, candidate: Levers, purpose: str) -> Window:
    levers, other = (candidate, {}) if turn.candidate else ({}, candidate)
    size = bench.size.stretched(turn.stretch)
    skip = size.skipped(other, levers, bench.levers)
    window = bench.window(levers, purpose=purpose if levers else "baseline", skip=skip, num_steps=size.num_steps)
    if levers:
        pairs.saw(bench.last_evidence, bench.last_missing)
    return window


def measure_processes(
    bench: Bench, candidate: tuple[Levers, Levers], extent: Extent, num_steps: int, pairs: Pairs | None = None
) -> Pairs:
    """Measure pairs of processes, one with levers that need a process of their own and one without.

    Args:
        bench: The script under measurement; whoever asks it next has a plain process.
        candidate: The levers that need a process, and its others.
        extent: How much to measure.
        num_steps: Steps of each window.
        pairs: Is gone on with; None begins anew.

    Raises:
        CandidateFailed: The script broke under the levers.
    """
    process, inside = candidate
    pairs = pairs or Pairs(noise=bench.noise)
    asked = paired.turns(pairs, extent, bench.lots)
    turn = next(asked, None)
    while turn is not None:
        bench.start(process if turn.candidate else {})
        levers: Levers = inside if turn.candidate else {}
        bench.window(levers, purpose="warm-up", skip=bench.size.loader_skip_steps)
        window = bench.window(levers, purpose="trial" if turn.candidate else "baseline", num_steps=num_steps)
        if turn.candidate:
            pairs.saw(bench.last_evidence, {})
        turn = paired.after(asked, window)
    bench.leave()
    return pairs


def wait_for_quiet(bench: Bench, deadline_s: float, show: Callable[[str], None]) -> bool:
    """Measure plain windows until others leave the machine alone; False when they do not before the deadline."""
    for _ in range(20):
        window = bench.window({}, purpose="baseline")
        if bench.resize_after(window):
            continue
        if not paired.is_busy(window):
            return True
        left_s = deadline_s - time.perf_counter()
        if left_s < 0:
            return False
        of = "GPU" if window.taken_fraction > (window.foreign_fraction or 0.0) else "CPU"
        show(f"others use {100 * window.taken_fraction:.0f} % of the {of}: waiting, at most {left_s:.0f} s")
        time.sleep(1.0)
    return False
