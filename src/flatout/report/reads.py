"""How are the places said at which values are read on the host? A block on a terminal, rows on the page.

In: a `Result`. Out: words and rows; none where nobody looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.judge.read_sites import ReadSite
from flatout.judge.result import Result
from flatout.report import words
from flatout.report.screen import Screen

MOST_ON_SCREEN = 4

WORTH_A_LINE = 1.005
"""A deferral that brings less is not among what `tune` says; `why` shows every place."""

LONGEST_CODE = 40
LONGEST_PATH = 50


def show(screen: Screen, result: Result, *, verbose: bool) -> None:
    """One paragraph for each place; for `tune`, which has little room, for those alone that are worth a change."""
    found = result.reads
    if found is None:
        return
    everything = verbose or result.command == "why"
    sites = [s for s in found.sites if everything or (s.deferrable and s.ratio >= WORTH_A_LINE)]
    shown = sites if verbose else sites[:MOST_ON_SCREEN]
    for number, site in enumerate(shown):
        rest = f"{often(site)}, {words.seconds(site.waited_s)}; {becomes(site)}"
        screen.say("reads" if number == 0 else "", f"{place(site)} `{code(site)}` {rest}", most=0 if verbose else 3)
    if len(shown) < len(sites):
        screen.say("", (f"{len(sites) - len(shown):,} more: --verbose", "dim"))
    if found.together is not None and sum(site.deferrable for site in shown) > 1:
        screen.say("", f"all that are only printed together: at most {words.times(found.together)}")


def rows(result: Result) -> list[Sequence[str]]:
    """Where, what it reads, what becomes of that; how often and how long in a mean step, what deferring it brings."""
    sites = result.reads.sites if result.reads is not None else ()
    return [
        (
            place(site),
            f"`{code(site)}`",
            becomes(site),
            often(site),
            words.seconds(site.waited_s),
            words.ratio(site.ratio) if site.deferrable else "",
        )
        for site in sites
    ]


def sources(result: Result, command: str) -> list[tuple[str, str, str]]:
    """How these numbers are obtained again; nothing where there are none."""
    if result.reads is None or not result.reads.sites:
        return []
    how = "windows of their own, in which each call that reads was timed; what is only printed, the source tells"
    return [("values read on the host", how, command)]


def place(site: ReadSite) -> str:
    """File and line, as they are typed here; of a long path the end."""
    name = str(words.nearby(Path(site.file)))
    return f"{name if len(name) <= LONGEST_PATH else f'…{name[1 - LONGEST_PATH :]}'}:{site.line}"


def code(site: ReadSite) -> str:
    """The expression that reads, in one line."""
    return words.shortened(" ".join(site.code.replace("`", "'").split()), LONGEST_CODE) or site.read


def often(site: ReadSite) -> str:
    """How often in a step."""
    return f"{words.three(site.reads_per_step)} a step"


def becomes(site: ReadSite) -> str:
    """What becomes of the value, and what follows for the step."""
    if site.use == "printed":
        how = "deferring it" if site.on_device else "reading it less often"  # nothing waits for a value on the host
        return f"only printed: {how} brings at most {words.times(site.ratio)}"
    if site.use == "unused":
        return f"nothing takes it: without it at most {words.times(site.ratio)}"
    if site.use == "used":
        return f"its value is used: {site.why}"
    return f"whether its value is needed is not told: {site.why}"
