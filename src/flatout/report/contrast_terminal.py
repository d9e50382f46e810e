"""What does a terminal show of two runs side by side? What differs besides time, then what changed and what did not.

In: a `Contrast`. Out: a `Report`, which `flatout.report.screen.show` prints and `plain` turns into text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flatout.judge.contrast import Change, Contrast, Side, Unlike
from flatout.report import contrast_words, words
from flatout.report.screen import Report, Screen

_STYLES = {"faster": "green", "slower": "red", "no difference": "dim", "inconclusive": "yellow"}


def contrast(found: Contrast, *, page: Path | str | None = None) -> Report:
    """Two runs side by side.

    Args:
        found: What to show.
        page: Where its page was written; None where it was not.
    """

    def compose(screen: Screen) -> None:
        for letter, name, side in zip("AB", contrast_words.names(found), (found.first, found.second), strict=True):
            _side(screen, letter, name, side)
        screen.blank()
        _unlike(screen, found)
        _table(screen, found)
        screen.blank()
        _result(screen, found)
        for name, text in contrast_words.groups(found):
            screen.say(name, text, indent=13)
        if apart := contrast_words.taken_apart(found):
            screen.say("warning", (apart, "yellow"), indent=13)
        for number, caution in enumerate(found.cautions):
            screen.say("mind" if number == 0 else "", (caution, "yellow" if number else ""), indent=13)
        screen.blank()
        if page is not None:
            screen.command("report", str(page))
        screen.command("next", *_next(found, page))

    return Report(compose)


class Exported(Protocol):
    """What was written for other programs; `flatout.report.former.Exported` is one."""

    @property
    def file(self) -> str:
        """Where."""

    @property
    def run(self) -> str:
        """The run folder."""

    @property
    def num_steps(self) -> int:
        """Steps in it."""

    @property
    def num_windows(self) -> int:
        """Windows that they come from."""

    @property
    def num_children(self) -> int:
        """Processes that made them."""

    @property
    def remarks(self) -> Sequence[str]:
        """What the reader must know."""


def exported(done: Exported) -> Report:
    """What was written for other programs."""

    def compose(screen: Screen) -> None:
        what = (words.plural(done.num_steps, "step"), words.plural(done.num_windows, "window"))
        processes = f"{done.num_children:,} process{'' if done.num_children == 1 else 'es'}"
        screen.say("written", (done.file, "bold"), f": {' of '.join(what)}, from {processes}")
        for number, remark in enumerate(done.remarks):
            screen.say("mind" if number == 0 else "", (remark, "yellow"))
        if done.file.lower().endswith(".json"):
            screen.say("open it", "at https://ui.perfetto.dev, or `chrome://tracing`; it stays on your machine")
        screen.command("next", f"flatout report {shlex.quote(str(words.nearby(Path(done.run))))}")

    return Report(compose)


def _side(screen: Screen, letter: str, name: str, side: Side) -> None:
    screen.row((f"{letter}  {name}", "bold"), f"  {words.stamp(side.created)} · {side.command} · {side.typed}")


def _unlike(screen: Screen, found: Contrast) -> None:
    for title, rows, style in (
        ("not like with like: what differs besides time", [u for u in found.unlike if u.decisive], "bold yellow"),
        ("differs, too", [u for u in found.unlike if not u.decisive], "bold"),
    ):
        if rows:
            screen.row((title, style))
            for one in rows:
                screen.say(f"  {one.what}", _from_to(one), indent=max(len(one.what) + 4, 16), style="")
            screen.blank()


def _from_to(one: Unlike) -> str:
    return f"{one.first} → {one.second}"


def _table(screen: Screen, found: Contrast) -> None:
    rows = [found.step, *((found.tuned_step,) if found.tuned_step else ()), *found.phases]
    name = max(len(change.name) + 2 * (change.name in _names(found)) for change in rows)
    head = f"{'a step':<{name}}  {'A':>8}  {'B':>8}  {'B less A':>9}  {'ratio':>5}  95 %"
    screen.row((head, "bold"))
    for change in rows:
        _row(screen, change, name, inside=change.name in _names(found))


def _names(found: Contrast) -> set[str]:
    return {change.name for change in found.phases}


def _row(screen: Screen, change: Change, name: int, *, inside: bool) -> None:
    _, _, more, ratio, ends, verdict = contrast_words.cells(change)
    first, second = (words.seconds(x) if x is not None else "–" for x in (change.first_s, change.second_s))
    head = screen.fit(f"{'  ' if inside else ''}{change.name}", name)
    times = f"  {first:>8}  {second:>8}  {more:>9}  {ratio:>5}  {ends:<12}  "
    screen.row(head, times, (verdict, _STYLES.get(verdict, "dim")))


def _result(screen: Screen, found: Contrast) -> None:
    said = contrast_words.headline(found)
    _, other = contrast_words.names(found)
    style = {"faster": "bold green", "slower": "bold red", "inconclusive": "bold yellow"}.get(said.verdict, "bold")
    screen.say("result", (said.verdict, style), f": `{other}` {said.sentence.removesuffix('.')}", indent=13)
    if same := contrast_words.alike(found):
        screen.say("", same, indent=13)


def _next(found: Contrast, page: Path | str | None) -> tuple[str, ...]:
    if page is None:
        return (contrast_words.command(found, "--html contrast.html"),)
    return ("flatout tune", found.second.typed)
