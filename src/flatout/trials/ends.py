"""What broke in a child, and what follows? Levers that raised or stayed; a script that cannot be measured.

In: how it ended, and what it wrote. Out: a failed candidate, warnings, or an error in three parts.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from flatout.errors import FlatoutError, Inconclusive, ScriptError
from flatout.frameworks import kind
from flatout.records.trace import Failure, Levers, Record
from flatout.report.words import nearby, printable
from flatout.run.launch import Ended
from flatout.run.script import Script
from flatout.trials.sample_ends import Hung, NotReached

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class CandidateFailed(Exception):
    """The script broke while a candidate was engaged; says how."""


def not_released(records: Iterable[Record]) -> str:
    """What broke when a child was to take a lever back, after which it ends; empty where nothing."""
    return next((sentence(r) for r in records if isinstance(r, Failure) and r.stage == "release"), "")


def raise_failures(records: Iterable[Record], levers: Levers) -> dict[str, None]:
    """Warnings of what broke in a child that goes on.

    Raises:
        CandidateFailed: It broke under levers.
    """
    found: dict[str, None] = {}
    for record in records:
        if isinstance(record, Failure) and record.stage != "recorder":
            if levers:
                raise CandidateFailed(sentence(record))
            found[f"{record.stage}: {record.error}: {record.message[:200]}"] = None
    return found


def sentence(failure: Failure) -> str:
    """Where and how something broke, in one line."""
    kind = "out of memory" if failure.out_of_memory else failure.error
    return f"{failure.stage}: {kind}: {(failure.message.splitlines() or [''])[0]}"[:300]


def launcher_failed(words: Sequence[str], problem: FlatoutError) -> FlatoutError:
    """What to say of a launcher whose ranks do not train."""
    if isinstance(problem, NotReached | Hung):
        return problem
    command = shlex.join(words)
    return ScriptError(f"`{command}` failed", cause=problem.cause, hint=f"`{command}` shows the same")


# -- a plain script that cannot be measured -------------------------------------------------------------------------


def cannot_measure(script: Script, end: Ended, limit_s: float) -> ScriptError:
    """The error for a plain script that gave nothing to measure."""
    again = _seen_again(script, end)
    printed = end.output.strip().splitlines()
    last = f"the last line it printed: `{_plain(printed[-1])[:160]}`" if printed else "it printed nothing"
    if end.hung and end.num_steps:
        return ScriptError(
            f"`{script.name}` stopped making training steps",
            cause=f"after {end.num_steps} steps none came in time; {last}",
            hint=f"{again}; if its steps only take long, `--start-limit 10m` waits longer for the first ones",
        )
    if end.hung and end.trained:
        return ScriptError(
            f"`{script.name}` did not make its first few training steps within {limit_s:.0f} s",
            cause=f"its steps take very long, or it stopped; {last}",
            hint="`--start-limit 10m` waits longer",
        )
    if end.hung:
        return ScriptError(
            f"`{script.name}` made no training step within {limit_s:.0f} s",
            cause=f"no optimizer update was seen; {last}",
            hint=f"`--start-limit 10m` waits longer; steps are seen through {kind().steps_show_in}",
        )
    if end.finished:
        few = f"after {end.num_steps} training steps" if end.num_steps else "without a training step"
        return ScriptError(
            f"`{script.name}` ended {few}",
            cause="that is too few to measure"
            if end.num_steps
            else "no optimizer update was seen, nor so many backward passes that updates by hand would be believed",
            hint="give it more epochs or more data"
            if end.num_steps
            else "is this the script that trains, long enough?",
        )
    if end.exit_code is not None and end.exit_code < 0:
        return ScriptError(f"`{script.name}` was {end.sentence()}", cause=last, hint=again)
    kept = f"; all that it printed is in `{nearby(Path(end.output_path))}`" if end.output_path and printed else ""
    return ScriptError(
        f"`{script.name}` failed: {_plain(end.sentence())}", cause=_raised(end) or last, hint=f"{again}{kept}"
    )


def cannot_release(script: Script, broke: str) -> Inconclusive:
    """The error for a plain script of which nothing was seen because a lever stayed: that is no fault of the script's.

    Args:
        script: The script.
        broke: What was raised as the lever was to be taken back.
    """
    return Inconclusive(
        f"`{script.name}` could not be measured plainly: a lever could not be released",
        cause=printable(broke),
        hint="`--without LEVER` leaves it out",
    )


def cannot_record(script: Script, what: str, records: Iterable[Record]) -> Inconclusive:
    """The error for a script that trains, of which `what` is not among the records: that is flatout's own fault."""
    broke = [sentence(one) for one in records if isinstance(one, Failure) and one.stage != "script"]
    return Inconclusive(
        f"`{script.name}` trains, but {what} could not be recorded",
        cause=printable(broke[-1]) if broke else "the record is not there, and nothing says why",
        hint="the script is not to blame: please report it, with the newest folder in `.flatout`",
    )


def _seen_again(script: Script, end: Ended) -> str:
    """How to see the same without flatout, or, of what a trial alone brings about, what to do about it."""
    failure = end.failure
    if failure is not None and f"Errno {errno.EXDEV}" in failure.message:
        return "in a trial folders cannot be renamed, only files: `shutil.move` does both, or pass `--allow-writes`"
    if failure is not None and f"Errno {errno.EROFS}" in failure.message:
        return (
            "a trial may write to the working folder, the script's, home and temporary ones, where it leaves no trace; "
            "elsewhere with `--allow-writes`, for good"
        )
    if failure is not None and failure.error == "EOFError":
        return "in a trial nobody answers questions: give the script what it asks for as an argument"
    return f"`python {script.typed}` shows the same"


def _raised(end: Ended) -> str:
    """Where in the script's own code the exception was raised; empty where that is not known."""
    file, _, line = (end.failure.place if end.failure is not None else "").rpartition(":")
    return f"it came from line {line} of `{_plain(str(nearby(Path(file))))}`" if file else ""


def _plain(text: str) -> str:
    """A script's own words, without what would colour or move on the terminal."""
    return printable(COLOUR.sub("", text))
