"""What is said of two runs side by side? The verdict, what changed, what did not, and what cannot be told.

In: a `Contrast`. Out: words, the same for the terminal and the page.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flatout.judge.contrast import Change, Contrast
from flatout.report import words

OTHER_LENGTH = 1.1
"""From this ratio on a step that was taken apart is no longer as long as one that was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The verdict on the whole step.

    Attributes:
        number: The one number.
        unit: What it is a number of.
        sentence: The verdict in words; it begins with the second run's name.
        verdict: The same in one word or two.
    """

    number: str
    unit: str
    sentence: str
    verdict: str


def names(found: Contrast) -> tuple[str, str]:
    """What the two runs are called: their folders' names, or their paths where these are equal."""
    one, other = Path(found.first.run or "first"), Path(found.second.run or "second")
    return (one.name, other.name) if one.name != other.name else (str(one), str(other))


def headline(found: Contrast) -> Headline:
    """The verdict on the whole step; what is not like with like is not said to be faster."""
    one, other = (f"`{name}`" for name in names(found))
    judged = found.step.compared
    if judged is None or not words.known(judged.ratio):
        reason = judged.reason if judged is not None else "the step was not measured in both"
        return Headline(
            number="No ratio", unit=f"of {one} to {other} can be given",
            sentence=f"cannot be held against {one}: {reason}.", verdict="inconclusive",
        )  # fmt: skip
    ends = words.interval(judged.low, judged.high)
    number = f"{words.ratio(judged.ratio)}x"
    if judged.verdict == "inconclusive":
        sentence = f"may or may not differ from {one}: {judged.reason}."
        return Headline(number=ends, unit=f"times as fast as {one}, 95 %", sentence=sentence, verdict="inconclusive")
    sentence = {
        "faster": f"took less time a step than {one}: it was {number} as fast {ends}.",
        "slower": f"took more time a step than {one}: it was {number} as fast {ends}.",
        "no difference": f"took as long a step as {one}, within 2 % {ends}.",
    }[judged.verdict]
    if not found.like_with_like:
        sentence = sentence.removesuffix(".") + ", but not like with like."
    return Headline(number=number, unit=f"as fast as {one}", sentence=sentence, verdict=judged.verdict)


def groups(found: Contrast) -> list[tuple[str, str]]:
    """What changed, what did not, what cannot be told and why, and what was not observed, as far as there is any."""
    by: dict[str, list[str]] = {}
    one, other = names(found)
    for change in found.phases:
        judged = change.compared
        if change.verdict in ("faster", "slower") and judged is not None:
            by.setdefault("changed", []).append(f"{change.name} ({change.verdict}, {_from_to(change)})")
        elif change.verdict == "no difference":
            by.setdefault("unchanged", []).append(change.name)
        elif change.verdict == "not observed":
            where = one if change.first_s is None else other
            by.setdefault("not observed", []).append(f"{change.name} in {where}")
    for reason, phases in _reasons(found.phases):
        by.setdefault("inconclusive", []).append(f"{', '.join(phases)}: {reason}")
    if found.not_observed:
        by.setdefault("not observed", []).append(f"{', '.join(found.not_observed)} in either")
    return [(name, ("; " if name == "inconclusive" else ", ").join(by[name])) for name in _ORDER if name in by]


_ORDER = ("changed", "unchanged", "inconclusive", "not observed")


def _reasons(phases: Iterable[Change]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for change in phases:
        if change.verdict == "inconclusive" and change.compared is not None:
            found.setdefault(change.compared.reason, []).append(change.name)
    return list(found.items())


def taken_apart(found: Contrast) -> str:
    """How long a step took in the windows in which it was taken apart, where that is another length; else empty."""
    parts = []
    for name, side, usual_s in zip(
        names(found), (found.first, found.second), (found.step.first_s, found.step.second_s), strict=True
    ):
        apart_s = side.anatomy.step_s
        if usual_s is None or not (words.known(usual_s) and words.known(apart_s)) or min(usual_s, apart_s) <= 0:
            continue
        if max(usual_s, apart_s) > OTHER_LENGTH * min(usual_s, apart_s):
            parts.append(f"{words.seconds(apart_s)} instead of {words.seconds(usual_s)} in `{name}`")
    if not parts:
        return ""
    return (
        f"phases were timed in windows of their own, in which a step took {', and '.join(parts)}: that is what "
        "they sum to"
    )


def alike(found: Contrast) -> str:
    """What it means where every phase changed by the same factor; empty where they did not."""
    if not found.alike:
        return ""
    return (
        "one factor fits every phase that could be judged: so looks a machine that ran at another speed, more than a "
        "script that was changed"
    )


def cells(change: Change) -> tuple[str, str, str, str, str, str, str]:
    """First with its spread, second with its spread, difference, ratio, interval."""
    judged = change.compared
    return (
        *_time(change.first_s, change.first_spread_fraction),
        *_time(change.second_s, change.second_spread_fraction),
        difference(change.difference_s),
        words.ratio(judged.ratio) if judged else "",
        words.interval(judged.low, judged.high) if judged else "",
    )


def difference(value_s: float | None) -> str:
    """Seconds more or less.

    >>> difference(0.0012), difference(-2e-6), difference(None)
    ('+1.2 ms', '-2 µs', '')
    """
    if value_s is None or not words.known(value_s):
        return ""
    return f"{'+' if value_s > 0 else ''}{words.seconds(value_s)}"


def _time(value_s: float | None, spread: float) -> tuple[str, str]:
    if value_s is None:
        return "not observed", ""
    return words.seconds(value_s), words.scatter(value_s, spread).strip()


def _from_to(change: Change) -> str:
    return f"{words.seconds(change.first_s)} to {words.seconds(change.second_s)}"


def command(found: Contrast, *options: str) -> str:
    """What to type to see this again."""
    runs = (shlex.quote(str(words.nearby(Path(side.run)))) for side in (found.first, found.second))
    return " ".join(["flatout report", *runs, *options])
