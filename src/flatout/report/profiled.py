"""What is shown of a few profiled steps: how much of them something computes, why nothing does, and what takes most?

In: a `Result`. Out: lines for a terminal, a figure with its table for the page.
"""

from __future__ import annotations

from flatout.judge.profiled_time import ALLOCATION, COPIES, INPUT, PYTHON, QUEUED, SYNC, Part, ProfiledTime
from flatout.judge.result import Result
from flatout.report import words
from flatout.report.drawing import Bar, Bars
from flatout.report.evidence import PROFILE
from flatout.report.figures import phase_colour
from flatout.report.table import Table, folded, table
from flatout.report.view import Figure, Item, Listing

SAID_CAUSES, SAID_PARTS, LONGEST_NAME = 3, 3, 48
"""Causes and parts on a terminal; characters of a kernel's name."""

MUCH_LONGER = 1.5
"""From here on it is said on a terminal that profiled steps are longer than others."""

COLOURS = {INPUT: "data", COPIES: "copy", PYTHON: "other", SYNC: "sync", ALLOCATION: "garbage", QUEUED: "loss"}
BUSY = "communication"

_CAPTION = (
    "Look at what stands behind the first part: nothing computes then{}. A few steps under the framework's own "
    "profiler, which makes them longer{}; no speed is taken from them."
)
_OF_DEVICE = " on the device, and the script is why"
_OF_THREAD = " in the training thread, which is in Python"


def lines(result: Result) -> list[Item]:
    """Two lines: of what the step is made, and what takes most of it."""
    found = result.profiled
    if found is None:
        return []
    causes = [f"{_why(name, found)} {words.share(lost / found.step_s)}" for name, lost in found.by_cause.items()]
    idle = f"; {'idle for ' if found.on_device else ''}{', '.join(causes[:SAID_CAUSES])}"
    cores = f"; tensor cores {words.share(found.tensor_core_share)} of that" if found.tensor_core_share else ""
    head = f"{_busy(found)} {words.share(found.busy_share)} of the step{cores}{idle if causes else ''}"
    longer = found.step_s / result.anatomy.step_s
    if longer > MUCH_LONGER:
        head += f" (which took {words.times(longer)} as long as others: the profiler, or others that computed)"
    most = [f"{name(part, 30)} {words.share(part.share)}{_limit(part)}" for part in found.parts[:SAID_PARTS]]
    said = (head, *([f"most takes {', '.join(most)}"] if most else []))
    return [Listing(label="profiled", entries=said, most=len(said), each=True, on="screen")]


def figure(result: Result) -> Figure | None:
    """The strip, with its numbers."""
    found = result.profiled
    if found is None:
        return None
    strip = [(_busy(found), BUSY, found.busy_s)]
    strip += [(_why(one, found), COLOURS.get(one, phase_colour(one)), lost) for one, lost in found.by_cause.items()]
    shares = [(what, colour, words.share(seconds / found.step_s)) for what, colour, seconds in strip]
    bar = Bar(name="profiled", total=f"{words.seconds(found.step_s)} a step", parts=tuple(strip))
    said = f"{words.seconds(found.step_s)} a step: {', '.join(f'{what} {share}' for what, _, share in shares)}"
    longer = found.step_s / result.anatomy.step_s - 1
    by = f", here by {words.percent(longer)}" if longer > 0 else ""
    return Figure(
        drawing=Bars(name="profiled", label=said, bars=(bar,)),
        caption=_CAPTION.format(_OF_DEVICE if found.on_device else _OF_THREAD, by),
        legend=tuple((colour, "", f"{what} {share}", PROFILE) for what, colour, share in shares),
        tables=(folded(parts(found), "What takes most"),),
    )


def parts(found: ProfiledTime) -> Table:
    """The kernels, or operators, that take most."""
    rows = [
        (
            name(part), part.operator.removeprefix("aten::"),
            {True: "tensor cores", False: "", None: ""}[part.tensor_cores], words.three(part.calls),
            words.seconds(part.seconds), words.share(part.share),
            f"{words.percent(part.fraction)} of {words.ceiling(part.limit)}" if part.fraction is not None else "",
        )
        for part in found.parts
    ]  # fmt: skip
    head = ("kernel" if found.on_device else "operator", "for", "on", "calls", "a step", "share", "of its limit")
    return table("What takes most of a profiled step", head, rows, texts=3, links={4: [PROFILE] * len(rows)})


def name(part: Part, most: int = LONGEST_NAME) -> str:
    """As much of a kernel's name as tells it from others: without what it is a template of."""
    said = part.name.removeprefix("aten::").removeprefix("void ").replace("at::native::", "")
    return f"`{words.shortened(said.replace('`', ''), most)}`"


def _busy(found: ProfiledTime) -> str:
    return "device busy" if found.on_device else "operators"


def _why(cause: str, found: ProfiledTime) -> str:
    if cause == PYTHON:
        return "Python between launches"
    return cause if found.on_device or cause == INPUT else f"Python in {cause}"


def _limit(part: Part) -> str:
    if part.fraction is None:
        return ""
    return f" ({words.percent(part.fraction)} of {words.ceiling(part.limit)})"
