"""Which levers that can be switched while a script runs make it faster together? Asked of one window after the other.

In: a space of levers, and answers. Out: `Ask`s, in the end `Screened`: the best set, whose numbers agree, and what each
lever brings alone. A window runs under a set that `search/effects.py` draws, so every window tells something of every
lever. What breaks, takes no effect or disagrees leaves the design. Nothing here measures: whoever asks, `tune` in
throwaway processes or `run --learn` in the user's own, reads the windows and compares the numbers. That a set is
*faster* is not said here either, but by the paired experiment that follows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flatout.frameworks.lever import Lever
from flatout.judge.agreement import Judgement
from flatout.records.plan import CLASSES, Trial
from flatout.records.trace import Levers
from flatout.trials.search.effects import Effects
from flatout.trials.search.space import CHEAP, Space, checks_of, clash, contains, cost_of, widest_class

AGREES = Judgement(verdict="agrees", detail="")

MOST_VOID = 20
"""After so many windows in a row that count for nothing no more are asked for."""

MOST_WINDOWS = 120
"""Nor after so many in all."""

NO_EFFECT = 3
"""A lever that shows no effect in so many windows has none."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be found out next.

    Attributes:
        levers: Under which levers.
        what: `window`: how long a step takes. `batches`: whether the items are the script's, before such a lever runs
            in a window. `numbers`: whether the arithmetic agrees.
        class_: The widest class that the levers turned out to have, where numbers are asked for.
    """

    levers: Levers
    what: Literal["window", "batches", "numbers"] = "window"
    class_: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found out.

    Attributes:
        step_s: Seconds of a step, above 0; None where the window counts for nothing.
        disturbed: The share of the CPU that others took.
        failure: Why the script broke, or empty.
        at_release: Whether it broke when levers of the window before were to be taken back.
        missing: By lever why it has shown no effect yet.
        evidence: By lever the proof that it took effect.
        judgement: Whether numbers agree.
        class_: What class the levers turned out to have; empty for their own.
    """

    step_s: float | None = None
    disturbed: float = 0.0
    failure: str = ""
    at_release: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, str] = field(default_factory=dict)
    judgement: Judgement | None = None
    class_: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """What came of it.

    Attributes:
        trials: What failed and what disagrees, what each lever brings alone, and the best set, where there is one.
        num_windows: Windows that were measured.
        noise: The standard deviation of the logarithm of one of them.
        is_settled: Whether no other set can be much faster than what was found, plain where nothing was.
    """

    trials: tuple[Trial, ...] = ()
    num_windows: int = 0
    noise: float = 0.0
    is_settled: bool = True


Asking = Generator[Ask, Answer, Screened]


def screen(
    space: Space,
    may_go_on: Callable[[float], bool],
    lots: random.Random,
    fits: Callable[[Levers], bool] = lambda levers: True,
) -> Asking:
    """Ask for windows until the best set is known, or there is no more time.

    Args:
        space: The levers; one that the script was tuned to before comes first.
        may_go_on: Whether there is time for another window, told what the best set so far should bring over plain.
        lots: Draws the sets.
        fits: Whether a set may run, beyond what levers say of each other.
    """
    singles = [one.levers for one in space.singles if cost_of(one.levers, space.levers) == CHEAP]
    effects = Effects(
        singles,
        lambda levers: not clash(levers, space) and fits(levers),
        lambda one, other: _are_partners(one, other, space.levers),
        lots,
    )
    return (yield from _Screen(space, singles, may_go_on, effects).asking())


class _Screen:
    def __init__(
        self, space: Space, singles: Sequence[Levers], may_go_on: Callable[[float], bool], effects: Effects
    ) -> None:
        self._space, self._singles, self._may_go_on, self._effects = space, singles, may_go_on, effects
        self._found: list[Trial] = []
        self._ran: list[Levers] = []
        """Levers that have run in a window."""
        self._items_agree: list[Levers] = []
        self._classes: dict[str, str] = {}
        """Classes of levers that turned out to have another one than their own."""
        self._evidence: dict[str, str] = {}
        self._missed: dict[str, int] = {}
        self._before: Levers = {}
        """The set of the window before."""
        self._num_void = 0
        self._begun_s = time.perf_counter()

    def asking(self) -> Asking:
        """Ask until the best is known."""
        best: Trial | None = None
        own = self._space.own
        is_cheap = own is not None and cost_of(own.levers, self._space.levers) == CHEAP
        queue: list[Levers] = [{}, own.levers] if own is not None and is_cheap else []
        settled = not self._singles
        while best is None and self._singles:
            if self._is_over():
                best = yield from self._judged()
                continue
            levers = queue.pop(0) if queue else self._effects.next()
            if (yield from self._window(levers)) and self._effects.is_settled():
                best = yield from self._judged()
                settled = best is not None
        alone = [self._alone(single) for single in self._left()]
        if best is not None and best.levers:
            alone = [one for one in alone if one.levers != best.levers] + [best]
        trials = [*self._found, *alone]
        each_s = (time.perf_counter() - self._begun_s) / max(len(trials), 1)
        return Screened(
            trials=tuple(replace(trial, took_s=each_s) for trial in trials),
            num_windows=self._effects.num_windows, noise=self._effects.noise, is_settled=settled,
        )  # fmt: skip

    def _is_over(self) -> bool:
        over = self._num_void == MOST_VOID or self._effects.num_windows >= MOST_WINDOWS
        return over or not self._may_go_on(self._effects.gain())

    def _left(self) -> list[Levers]:
        """Single levers that have run, and are still in the design."""
        gone = [trial.levers for trial in self._found]
        return [single for single in self._singles if single in self._ran and single not in gone]

    def _window(self, levers: Levers) -> Generator[Ask, Answer, bool]:
        """A window under a set; whether it told something."""
        if not (yield from self._give_the_items(levers)):
            return False
        answer = yield Ask(levers)
        if answer.failure:
            yield from self._blame(self._before if answer.at_release else levers, answer.failure)
            return False
        self._before = levers
        self._ran += [one for one in _parts(levers) if one not in self._ran]
        self._evidence.update(answer.evidence)
        for name, why in answer.missing.items():
            self._missed[name] = self._missed.get(name, 0) + (name not in self._evidence)
            if self._missed[name] == NO_EFFECT and name in levers:
                self._drop({name: levers[name]}, f"{name} took no effect: {why}")
        if answer.step_s is None:
            self._num_void += 1
            return False
        self._num_void = 0
        self._effects.saw(levers, answer.step_s, answer.disturbed)
        return True

    def _drop(self, levers: Levers, reason: str, judgement: Judgement | None = None, ratio: bool = False) -> None:
        """A set leaves the design: it broke, or its numbers do not agree; `ratio`: what it brings is known even so."""
        self._effects.drop(levers)
        found = self._alone(levers) if ratio else Trial(levers=levers, outcome="failed", class_=self._class_of(levers))
        outcome: Literal["failed", "disagrees", "inconclusive"] = "failed"
        if judgement is not None:
            outcome = "disagrees" if judgement.verdict == "disagrees" else "inconclusive"
            found = replace(found, agreement=judgement.verdict, agreement_detail=judgement.detail)
        self._found.append(replace(found, outcome=outcome, reason=reason))

    def _class_of(self, levers: Levers) -> str:
        own = [self._classes.get(name, self._space.levers[name].class_) for name in levers]
        return max([widest_class(levers, self._space.levers), *own], key=CLASSES.index)

    def _give_the_items(self, levers: Levers) -> Generator[Ask, Answer, bool]:
        """Whether all levers of a set give the script's items: else the time of a window says nothing."""
        for one in _parts(levers):
            if one in self._items_agree or "batches" not in checks_of(one, self._space.levers):
                continue
            answer = yield Ask(one, "batches")
            (name,) = one
            if answer.class_:
                self._classes[name] = answer.class_
            judgement = answer.judgement
            if answer.failure or judgement is None or judgement.verdict != "agrees":
                self._drop(one, answer.failure or (judgement.detail if judgement else ""), judgement)
                return False
            self._items_agree.append(one)
        return True

    def _blame(self, levers: Levers, failure: str) -> Generator[Ask, Answer, None]:
        """Find out which lever broke a window, or could not be taken back: each alone; none of them, then the set."""
        self._before = {}
        suspects = _parts(levers) if len(levers) > 1 else []
        broken = 0
        for one in suspects:
            if broke := (yield Ask(one)).failure or (yield Ask({})).failure:
                self._drop(one, broke)
                broken += 1
        if levers and not broken:
            self._drop(levers, failure)

    def _judged(self) -> Generator[Ask, Answer, Trial | None]:
        """The best set with its numbers judged; None where they disagree and it has left the design."""
        levers = self._effects.best() if self._effects.num_windows else {}
        if not levers:
            return Trial(levers={}, outcome="screened")
        trial = self._alone(levers)
        answer = yield Ask(levers, "numbers", trial.class_)
        judgement = answer.judgement
        if judgement is None or judgement.verdict == "agrees":
            detail = judgement.detail if judgement is not None else ""
            return replace(trial, agreement="agrees", agreement_detail=detail, evidence=self._evidence_of(levers))
        if len(levers) > 1:
            alike = [one for one in _parts(levers) if {*checks_of(one, self._space.levers)} - {"batches"}]
            for one in alike:
                apart = (yield Ask(one, "numbers", self._class_of(one))).judgement
                if apart is not None and apart.verdict != "agrees":
                    self._drop(one, apart.detail, apart, ratio=True)
        if not any(contains(levers, one.levers) for one in self._found):
            self._drop(levers, judgement.detail, judgement, ratio=True)
        return None

    def _evidence_of(self, levers: Levers) -> dict[str, str]:
        return {name: proof for name, proof in self._evidence.items() if name in levers}

    def _alone(self, levers: Levers) -> Trial:
        """What a set brings over plain, as far as all windows tell."""
        ratio, low, high = self._effects.brings(levers, {})
        return Trial(
            levers=levers, outcome="screened", ratio=ratio, ratio_low=low, ratio_high=high,
            num_windows=self._effects.num_windows, class_=self._class_of(levers), noise=self._effects.noise,
        )  # fmt: skip


def _are_partners(one: Levers, other: Levers, known: Mapping[str, Lever]) -> bool:
    return any(a in known[b].partners or b in known[a].partners for a in one for b in other)


def _parts(levers: Levers) -> list[Levers]:
    return [{name: settings} for name, settings in levers.items()]
