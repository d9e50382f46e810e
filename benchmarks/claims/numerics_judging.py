"""A training script in this process, with levers judged on it exactly as `tune` judges them in its child.

The framework is attached as in a trial, comparisons are made at step boundaries of the running script, and verdicts
come from `flatout.judge.agreement` with the class and the checks that the levers name. In: a script and levers. Out: a
verdict with the differences behind it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numerics_scripts import seed_all

from flatout.frameworks.lever import Lever, verify
from flatout.frameworks.pytorch.adapter import PyTorch
from flatout.frameworks.pytorch.seams import step_period
from flatout.judge import agreement
from flatout.machine.read import read_machine
from flatout.records.trace import Agreement, Levers
from flatout.trials.search.space import checks_of, widest_class

os.environ.setdefault("OMP_NUM_THREADS", "1")

WARM_UP_STEPS = 8
BETWEEN_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was said of some levers on a script."""

    word: str
    detail: str
    checks: tuple[str, ...] = ()
    points: list[Agreement] = field(default_factory=list)
    evidence: Mapping[str, str] = field(default_factory=dict)


class Broke(Exception):
    """A comparison raised."""


class _Listener:
    num_steps = 0

    def __init__(self) -> None:
        self.waiting: Callable[[], None] | None = None
        self.failures: list[tuple[str, BaseException]] = []

    def on_step(self, step) -> None:
        self.num_steps += 1

    def on_pass_end(self) -> None:
        pass

    def on_update(self) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting()

    def on_failure(self, stage: str, problem: BaseException) -> None:
        self.failures.append((stage, problem))


class Watched:
    """One script that is being watched, advanced step by step."""

    def __init__(self, script: Callable[[], Iterator[None]], planted: Mapping[str, Lever] | None = None) -> None:
        gc.collect()
        self._patience, step_period.PATIENCE = step_period.PATIENCE, 0  # for optimizers of scripts before this one
        torch.set_num_threads(1)
        seed_all(0)
        self.pytorch = PyTorch()
        for name, lever in (planted or {}).items():
            verify(lever)
            self.pytorch.session.levers[name] = lever
        self.listener = _Listener()
        self.pytorch.prepare({}, trial=True)
        self.pytorch.attach(self.listener)
        self._steps = script()

    @property
    def known(self) -> Mapping[str, Lever]:
        """All levers by name, planted ones too."""
        return self.pytorch.session.levers

    def train(self, num: int) -> None:
        """So many steps."""
        for _ in range(num):
            next(self._steps)

    def agreement(self, levers: Levers, checks: tuple[str, ...]) -> Agreement:
        """What `Bench.agreement` orders: engage nothing, keep two steps, compare before the second's update."""
        answers: list[Agreement] = []
        self.pytorch.engage({})
        self.pytorch.begin_capture()
        self.listener.waiting = lambda: answers.append(self.pytorch.compare(levers, checks))
        for _ in range(8):
            self.train(1)
            if self.listener.failures:
                stage, problem = self.listener.failures[0]
                raise Broke(f"{type(problem).__name__} in `{stage}`: {problem}") from problem
            if answers:
                return answers[0]
        return Agreement(levers=levers, differences=(), missing="the comparison gave no answer")

    def close(self) -> None:
        """Leave nothing behind."""
        self.pytorch.detach()
        self._steps.close()
        step_period.PATIENCE = self._patience


def judged(
    script: Callable[[], Iterator[None]],
    levers: Levers,
    planted: Mapping[str, Lever] | None = None,
    *,
    warm_up: int = WARM_UP_STEPS,
    applying: bool = False,
    forced: Sequence[str] = (),
) -> Verdict | None:
    """Judge levers on a script, as `trials/conduct.py` does: batches first, then two points, more where slopes ask.

    With `applying`, None where one of them does not apply to the script, those in `forced` apart.
    """
    watched = Watched(script, planted)
    try:
        watched.train(warm_up)
        facts, machine = watched.pytorch.facts(), read_machine()
        asked = [watched.known[name] for name in levers if name not in forced] if applying else []
        if any(lever.applies(facts, machine) is not None for lever in asked):
            return None
        return _judged(watched, levers)
    except Broke as problem:  # which `conduct` takes for a disagreement, and here is counted apart
        return Verdict(word="broke", detail=str(problem))
    finally:
        watched.close()


def _judged(watched: Watched, levers: Levers) -> Verdict:
    class_ = widest_class(levers, watched.known)
    checks = checks_of(levers, watched.known)
    points: list[Agreement] = []
    if "batches" in checks:
        points.append(watched.agreement(levers, ("batches",)))
        found = agreement.judge(points, class_, ("batches",))
        if checks == ("batches",) or found.verdict != "agrees":
            return Verdict(word=found.verdict, detail=found.detail, checks=("batches",), points=points)
        points = []
    for _ in range(2):
        points.append(watched.agreement(levers, checks))
        watched.train(BETWEEN_STEPS)
    while agreement.needs_more_points(points, agreement.judge(points, class_, checks)):
        points.append(watched.agreement(levers, checks))
    found = agreement.judge(points, class_, checks)
    evidence = _evidence(watched, levers) if found.verdict == "agrees" else {}
    return Verdict(word=found.verdict, detail=found.detail, checks=checks, points=points, evidence=evidence)


def _evidence(watched: Watched, levers: Levers) -> Mapping[str, Any]:
    """Whether the levers take effect at all: one that does nothing proves nothing."""
    watched.pytorch.engage(levers)
    watched.train(2)
    proofs, _ = watched.pytorch.evidence()
    watched.pytorch.engage({})
    return proofs
