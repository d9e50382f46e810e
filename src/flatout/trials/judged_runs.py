"""Has a run trained what the plain one has, by the same steps?

In: samples that kept their state. Out: a `Judgement`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.frameworks import kind
from flatout.judge import agreement
from flatout.judge.agreement import Judgement
from flatout.records.trace import Agreement
from flatout.trials.samples_of_runs import Sample

CHECKS = ("losses", "parameters")


@dataclass(frozen=True, slots=True)
class Told:
    """What was found; without equal random states nothing can be compared."""

    judgement: Judgement
    random_states_equal: bool = True


def compared(plain: Sample, nudged: Sample, sample: Sample, class_: str) -> Told:
    """Hold what a run has trained against the plain one, beside what rounding moves.

    Args:
        plain: The plain run.
        nudged: The same, with parameters moved in their last places after each step.
        sample: The run in question.
        class_: What it may change.
    """
    states = plain.state("last"), nudged.state("last"), sample.state("last"), plain.state("first")
    try:
        found = kind().trained_apart(*states)
    except (OSError, RuntimeError) as problem:
        return Told(Judgement(verdict="inconclusive", detail=f"what was trained was not kept: {problem}"))
    if not all(one.random_states_equal for one in found):
        return Told(Judgement(verdict="inconclusive", detail="random generators end elsewhere"), False)
    found += kind().losses_apart(plain.losses, nudged.losses, sample.losses)
    return Told(agreement.judge([Agreement(levers={}, differences=found)], class_, CHECKS))
