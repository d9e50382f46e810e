"""What do the terminal and the page both say of a result? How fast plain is, what binds, and what to type next.

In: a `Result`. Out: words, so that the two never tell the same run differently.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.judge import stats
from flatout.judge.result import Result
from flatout.records.trace import FOREIGN_LIMIT
from flatout.report import words

OVER = 1.2
"""So many times the budget that was asked for is worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Something in three parts of falling weight.

    Attributes:
        head: What it comes to, in bold.
        rest: What belongs to it.
        aside: What stands beside it.
    """

    head: str
    rest: str = ""
    aside: str = ""

    def __str__(self) -> str:
        """All of it in one line."""
        return f"{self.head}{self.rest}{self.aside}"


def baseline(result: Result, *, windows: bool) -> Said:
    """The speed of the plain script; with the number of `windows` that it is the median of."""
    spread = result.baseline_spread_fraction
    measured = [s for s in result.baseline_window_step_s if words.known(s)]
    details = []
    rest = f" ± {words.percent(spread)}" if words.known(spread) else ""
    if measured:
        step_s = stats.summarize(measured).median
        rest = words.scatter(step_s, spread)
        details.append(
            f"{words.seconds(step_s)} a step"
            + (f", median of {words.plural(len(measured), 'window')}" if windows else "")
        )
    if result.foreign_fraction is not None:
        details.append(f"others used {words.percent(result.foreign_fraction)} of the CPU")
    return Said(
        head=words.rate(result.baseline_steps_per_s),
        rest=rest,
        aside=f"  ({'; '.join(details)})" if details else "",
    )


def binding(result: Result) -> Said:
    """What binds, and how doubtful that is."""
    head, _, rest = result.diagnosis.sentence.partition(":")
    return Said(head=head or "not known", rest=f":{rest}" if rest else "", aside=doubt(result))


def doubt(result: Result) -> str:
    """What stands beside what binds where others used a good part of the machine meanwhile."""
    used = result.foreign_fraction or 0.0
    return f" (doubtful: others used {words.percent(used)} of the CPU)" if used > FOREIGN_LIMIT else ""


def next_command(result: Result) -> tuple[str, str]:
    """What to type next, under the terms of this run: the command with its options, and the script as it was typed."""
    if result.command == "why":
        return result.tune_command, result.typed
    if result.plan is not None:
        return result.run_command, result.typed
    if result.against_itself and result.remeasured is not None and words.known(result.remeasured.ratio):
        return "flatout tune", result.typed
    return ("flatout why" if result.verdict == "no difference" else result.retry_command), result.typed


def took(result: Result) -> str:
    """What finding out took, and what was asked for where that was much less."""
    asked_s = result.asked_budget_s
    over = asked_s is not None and result.tuning_s > OVER * asked_s
    return words.duration(result.tuning_s) + (f", where {words.duration(asked_s)} were asked for" if over else "")


def on_ranks(result: Result) -> str:
    """Where what is told was measured, of ranks that a launcher starts; empty of one process."""
    found = result.launched
    if found is None:
        return ""
    ranks = words.plural(found.num_ranks, "rank")
    if found.alone is None:
        return f"levers were searched on one of {ranks} by itself; none won there, so none was tried on all"
    ends = words.interval(found.alone.ratio_low, found.alone.ratio_high)
    brought = f"{found.alone.label} brought {words.times(found.alone.ratio)} {ends}".rstrip()
    return f"phases and trials are of one of {ranks} by itself, where {brought}; the result is of all, in whole starts"
