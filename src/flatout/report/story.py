"""What does the page say in sentences? The verdict, one number, and what follows from them.

In: a `Result`. Out: a `Story`. The terminal has its own, shorter words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flatout.judge.result import Result
from flatout.records.plan import Trial
from flatout.report import answer, tried, words
from flatout.report.tried import against_itself, best, input_reached, nothing_usable, remark


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The beginning of the page.

    Attributes:
        number: The one number.
        unit: What it is a number of.
        sentence: The verdict; the script's name stands before it.
        lead: Sentences below it.
        command: What to type next.
    """

    number: str
    unit: str
    sentence: str
    lead: tuple[str, ...]
    command: str = ""


def tell(result: Result) -> Story:
    """The beginning of the page for any verdict."""
    told = replace(_told(result), command=" ".join(answer.next_command(result)))
    ranks = answer.on_ranks(result)
    return replace(told, lead=(*told.lead, words.sentence(f"{ranks}."))) if ranks else told


def _told(result: Result) -> Story:
    if result.command == "why":
        return _why(result)
    if result.against_itself:
        return _against_itself(result)
    if result.verdict == "faster" and result.winner is not None:
        return _faster(result)
    return _nothing(result) if result.verdict == "no difference" else _inconclusive(result)


def _faster(result: Result) -> Story:
    won = result.winner
    assert won is not None
    gain = words.times(won.ratio)
    again = " when measured again in fresh windows" if won.remeasured else ""
    ends = tried.ends(won)
    lead = [
        f"{words.rate(result.baseline_steps_per_s)} before, {words.rate(result.tuned_steps_per_s)} with the plan. "
        f"The ratio has the 95 % interval {ends}{again}{_noise(result, '; ')}.",
        _numbers(won.agreement_detail, won.class_),
        words.sentence(f"{reached}.") if (reached := input_reached(result)) else "",
        _cost(result),
    ]
    return Story(
        number=gain,
        unit="as fast",
        sentence=f"trains {gain.removesuffix('x')} times as fast on this machine"
        + (", and its numbers agree." if won.agreement == "agrees" else "."),
        lead=tuple(line for line in lead if line),
    )


def _against_itself(result: Result) -> Story:
    word, rest = against_itself(result)
    found = result.remeasured
    return Story(
        number=words.ratio(found.ratio) + "x" if found is not None and words.known(found.ratio) else "No ratio",
        unit="against itself",
        sentence="was measured against itself, as if it were a lever: any difference that this finds is an error.",
        lead=(words.sentence(f"{word}{rest}."), _cost(result)),
    )


def _numbers(detail: str, class_: str) -> str:
    meaning = {
        "exact": "Every bit stays the same",
        "rounding": "Only the order of float operations differs",
        "precision": "Some products are computed in fewer bits",
        "statistical": "Other random numbers are drawn",
        "semantics": "The training itself is changed",
    }[class_]
    return f"{meaning}: {detail}." if detail else f"{meaning}."


def _nothing(result: Result) -> Story:
    found = best(result)
    number = words.ratio(found.ratio) + "x" if found is not None else words.times(1.0)
    used = result.diagnosis.model_flops_utilization
    ceiling = f"this machine's {result.diagnosis.arithmetic} ceiling"
    at = f" It reaches {words.percent(used)} of {ceiling}." if used is not None else ""
    lead = (
        f"{words.plural(len(result.trials), 'candidate')} were measured beside the plain script; the best brought "
        f"{number} {tried.ends(found) if found else ''}".rstrip()
        + f"{_noise(result, ', and ')}.",
        f"What binds is {result.diagnosis.sentence}{answer.doubt(result)}.{at}" if result.diagnosis.sentence else "",
        _cost(result),
    )
    return Story(
        number=number,
        unit="at best",
        sentence="is as fast as any lever makes it on this machine. Change nothing.",
        lead=tuple(line for line in lead if line),
    )


def _inconclusive(result: Result) -> Story:
    found = best(result)
    if found is not None and found.outcome in ("faster", "disagrees"):
        return _unproven(result, found)
    ends = tried.ends(found) if found is not None else ""
    lead = []
    if found is not None:
        lead.append(f"The best candidate brought {words.ratio(found.ratio)}x: {remark(found)}.")
    elif result.trials:
        lead.append(f"{words.sentence(nothing_usable(result))}.")
    if result.noise is not None and result.noise.reason:
        lead.append(f"The plain script against itself could not be judged either: {result.noise.reason}.")
    elif result.noise_fraction is not None:
        lead.append(f"{_noise(result, '').capitalize()}.")
    if result.foreign_fraction is not None:
        lead.append(f"Other processes used {words.percent(result.foreign_fraction)} of the CPU meanwhile.")
    became = "could be used" if result.trials else "was measured"
    unit = "95 % interval of the best candidate" if ends else f"no candidate {became}"
    lead.append("Nothing was changed and no plan was written. On a quieter machine, or with more time, measure again.")
    return Story(
        number=ends or "No answer",
        unit=unit if ends or found is None else "too few pairs of windows for an interval",
        sentence="may or may not be faster with a lever: this measurement cannot tell.",
        lead=tuple(lead),
    )


def _unproven(result: Result, found: Trial) -> Story:
    """Speed without numbers to trust is no result."""
    compared = found.outcome == "disagrees"
    ends = tried.ends(found)
    detail = found.agreement_detail or found.reason or "nothing was captured"
    return Story(
        number=words.times(found.ratio),
        unit="but other numbers" if compared else "but numbers that nobody compared",
        sentence="stays as it is: the fastest candidate "
        + ("does not compute the same." if compared else "could not be shown to compute the same."),
        lead=(
            f"`{found.label}` is {words.ratio(found.ratio)}x as fast{ends and f' {ends}'}, but: {detail}.",
            "Nothing was changed and no plan was written.",
            _cost(result),
        ),
    )


def _why(result: Result) -> Story:
    bounds = result.diagnosis.bounds
    bound = "was measured; what binds is" if result.diagnosis.contradictions else "is bound by"
    return Story(
        number=words.rate(result.baseline_steps_per_s).removesuffix(" steps/s"),
        unit="steps a second",
        sentence=f"{bound} {result.diagnosis.sentence or 'something that was not found'}{answer.doubt(result)}.",
        lead=tuple(
            f"{bound.remedy.capitalize()} would bring at most {words.times(bound.ratio)} ({bound.how})."
            for bound in bounds[:1]
        ),
    )


def _noise(result: Result, before: str) -> str:
    fraction = result.noise_fraction
    return "" if fraction is None else f"{before}two equal runs differ by up to {words.percent(fraction)} here"


def _cost(result: Result) -> str:
    took = f"Finding out took {answer.took(result)}"
    if result.plan is None:
        return f"{took}."
    if result.break_even_steps is None:
        return f"{took}, which the gain never earns back."
    return f"{took}, earned back after {words.three(result.break_even_steps)} steps{_runs(result)}."


def _runs(result: Result) -> str:
    runs, steps = result.break_even_runs, result.steps_in_run
    if runs is None or steps is None:
        return ""
    pays = "within this very run" if runs == 1 else f"from the {words.ordinal(runs)} run on"
    return f"; one run has {words.count(steps)}, so it pays {pays}"
