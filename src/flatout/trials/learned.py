"""What does a run that learns begin with, and what is kept of what it has learned?

In: where the run takes place, and what was asked for. Out: who tries levers on it, and afterwards a plan in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flatout.errors import FlatoutError, UsageError
from flatout.records import plan_file
from flatout.records.facts import Facts
from flatout.records.plan import PLAN_FILE
from flatout.run.choice import Here
from flatout.run.outcome import Outcome
from flatout.run.watch import Learner
from flatout.trials.learn import MOST_LOST_S, Asking, Learning, plan_of, why_no_plan
from flatout.trials.search.space import Choice

LINE = (
    "learning: levers that can be toggled are tried on this run, whose steps all count; "
    f"it may cost {MOST_LOST_S:.0f} s of them"
)


def check(beside: Mapping[str, bool]) -> None:
    """Make sure that something is left to learn.

    Args:
        beside: Options that leave nothing, and whether they were given.

    Raises:
        UsageError: One was.
    """
    named = next((option for option, given in beside.items() if given), None)
    if named is not None:
        raise UsageError(
            f"`--learn` and `{named}` cannot be combined",
            cause="a run that learns begins plainly and finds its levers itself",
            hint="leave out one of them; `flatout tune` tries levers before a run",
        )


def learner(here: Here, accept: str) -> Learner:
    """Who tries levers on the run."""

    def begin(facts: Facts) -> Asking:
        return Learning(here.registry, here.machine(), Choice(accept=accept), facts).asking()

    return begin


def keep(outcome: Outcome, here: Here, place: str, say: Callable[[str], None]) -> None:
    """Write the plan that a run has found, where its own windows show that it wins."""
    plan = plan_of(outcome, here, place)
    if plan is None:
        if why := why_no_plan(outcome):
            say(f"what was learned is not written as a plan: {why}")
        return
    path = Path(PLAN_FILE)
    try:
        plan_file.write(plan, path)
    except FlatoutError as problem:
        say(f"what was learned was not kept: {problem.error}")
    else:
        say(f"what was learned is in {path}: the next `flatout run {here.script}` begins with it")
