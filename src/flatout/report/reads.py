"""How are the lines said at which values are read on the host? A block on a terminal, rows on the page.

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

LONGEST_CODE = 40
LONGEST_PATH = 50


def show(screen: Screen, result: Result, *, verbose: bool) -> None:
    """A line for each; for `tune`, which has little room, for those alone at which the host waits for a device."""
    everything = verbose or result.command == "why"
    sites = [one for one in result.reads.sites if everything or one.on_device] if result.reads is not None else []
    shown = sites if verbose else sites[:MOST_ON_SCREEN]
    for number, site in enumerate(shown):
        took = f"{often(site)}, {words.seconds(site.waited_s)}"
        screen.say("reads" if number == 0 else "", f"{place(site)} `{code(site)}` {took}", most=0 if verbose else 3)
    if len(shown) < len(sites):
        screen.say("", (f"{len(sites) - len(shown):,} more: --verbose", "dim"))


def rows(result: Result) -> list[Sequence[str]]:
    """Where, what it reads; how often and how long in a mean step."""
    sites = result.reads.sites if result.reads is not None else ()
    return [(place(site), f"`{code(site)}`", often(site), words.seconds(site.waited_s)) for site in sites]


def sources(result: Result, command: str) -> list[tuple[str, str, str]]:
    """How these numbers are obtained again; nothing where there are none."""
    if result.reads is None or not result.reads.sites:
        return []
    return [("values read on the host", "windows of their own, in which each call that reads was timed", command)]


def place(site: ReadSite) -> str:
    """File and line, as they are typed here; of a long path the end."""
    name = str(words.nearby(Path(site.file)))
    return f"{name if len(name) <= LONGEST_PATH else f'…{name[1 - LONGEST_PATH :]}'}:{site.line}"


def code(site: ReadSite) -> str:
    """What stands in the line that reads."""
    return words.shortened(" ".join(site.code.replace("`", "'").split()), LONGEST_CODE) or site.read


def often(site: ReadSite) -> str:
    """How often in a step."""
    return f"{words.three(site.reads_per_step)} a step"
