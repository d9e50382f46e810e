"""How are levers screened in a throwaway process that toggles them? It answers what `search/screen.py` asks.

In: a bench, a space of levers, and who compares numbers. Out: `Screened`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from flatout.judge import paired
from flatout.judge.agreement import Judgement
from flatout.records.plan import Candidate, label
from flatout.records.trace import Levers
from flatout.trials.bench import Bench
from flatout.trials.child_failures import CandidateFailed
from flatout.trials.search.screen import AGREES, Answer, Ask, Screened, screen
from flatout.trials.search.space import Space, widest_class

UNEVEN = 0.15
"""A window that paid for what comes between two epochs counts as little as if others had taken so much of the CPU."""


class Judge(Protocol):
    """Who compares what levers compute with what the script computes."""

    def judge(self, levers: Levers, class_: str) -> Judgement:
        """Whether numbers agree as far as the class allows."""

    def judge_first(self, candidate: Candidate, class_: str) -> tuple[Judgement | None, str]:
        """Whether items are the script's, None where nothing speaks against it; and the class that levers have here."""


def screened(bench: Bench, space: Space, judge: Judge, stage: Callable[[str], None], until_s: float) -> Screened:
    """Find the best set of what can be switched while the script runs.

    Args:
        bench: The script under measurement.
        space: The levers.
        judge: Compares numbers.
        stage: Told what is going on.
        until_s: `time.perf_counter` after which no window is opened any more.
    """
    asking = screen(space, lambda gain: time.perf_counter() < until_s, bench.lots)
    before: Levers = {}
    try:
        ask = next(asking)
        while True:
            if ask.what == "window":
                stage("screening levers together")
                answer, before = _window(bench, ask.levers, before), ask.levers
            else:
                stage(f"comparing the numbers of {label(ask.levers)}")
                answer, before = _judgement(judge, ask, space), {**before, **ask.levers}
            ask = asking.send(answer)
    except StopIteration as end:
        found: Screened = end.value
        return found


def _window(bench: Bench, levers: Levers, before: Levers) -> Answer:
    size = bench.size.stretched(bench.lots.uniform(1 - paired.STRETCH, 1 + paired.STRETCH))
    skip = size.skipped(before, levers, bench.levers)
    bench.unreleased = ""
    purpose = "trial" if levers else "baseline"
    try:
        window = bench.window(levers, purpose=purpose, skip=skip, num_steps=size.num_steps)
    except CandidateFailed as failed:
        return Answer(failure=str(failed), at_release=bool(bench.unreleased))
    if bench.unreleased:
        return Answer(failure=bench.unreleased, at_release=True)
    if not levers:
        bench.resize_after(window)
    uneven = window.new_epochs == 1 and not size.epoch_steps  # it paid for what comes between two epochs
    return Answer(
        step_s=window.compared_s if window.counts else None,
        disturbed=window.taken_fraction + UNEVEN * uneven,
        missing=bench.last_missing if levers else {}, evidence=bench.last_evidence if levers else {},
    )  # fmt: skip


def _judgement(judge: Judge, ask: Ask, space: Space) -> Answer:
    if ask.what == "numbers":
        return Answer(judgement=judge.judge(ask.levers, ask.class_))
    class_ = widest_class(ask.levers, space.levers)
    try:
        judgement, found = judge.judge_first(Candidate(levers=ask.levers), class_)
    except CandidateFailed as failed:
        return Answer(failure=str(failed))
    return Answer(judgement=judgement or AGREES, class_=found if found != class_ else "")
