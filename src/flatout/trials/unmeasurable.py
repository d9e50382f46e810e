"""Why could a plain script not be measured? In: how its child ended, what broke. Out: an error in three parts."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from pathlib import Path

from flatout.errors import Inconclusive, ScriptError
from flatout.frameworks import kind
from flatout.records.trace import Failure, Record
from flatout.report.words import nearby, printable
from flatout.run.launch import Ended
from flatout.run.script import Script
from flatout.trials.ends import sentence

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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
